// Lists made of lengths and page tables, and what backends make of tensors, on a GPU and on a CPU.
#include <limits>
#include <numeric>
#include <optional>

#include "folio/backends/dispatch.hpp"
#include "folio/backends/flashinfer/kv_dequant.hpp"
#include "folio/backends/kv_scales.hpp"
#include "folio/table_ops.hpp"
#include "twin_array.hpp"

namespace folio::cuda_test {
namespace {

using Ints = std::vector<int32_t>;

/// A batch's lengths and tables of both kinds.
struct Tables {
  Tables(int32_t rows, int32_t page_size, std::mt19937& random) : kv_len(lengths(rows, page_size, random)) {
    Ints starts(kv_len.host.size() + 1), last(kv_len.host.size());
    paged_indptr(kv_len.host, page_size, starts, last);
    Ints pages(static_cast<size_t>(starts.back()));
    std::iota(pages.begin(), pages.end(), 5);
    std::shuffle(pages.begin(), pages.end(), random);
    columns = 0;
    for (const int32_t length : kv_len.host) columns = std::max(columns, pages_for(length, page_size));
    columns += 2;
    dense = Twin<int32_t>(folio::to_dense(csr_table(pages, starts), kv_len.host, page_size, columns, -1));
    indptr = Twin<int32_t>(starts);
    indices = Twin<int32_t>(pages);
    last_page_len = Twin<int32_t>(last);
  }
  static Ints lengths(int32_t rows, int32_t page_size, std::mt19937& random) {
    Ints values(static_cast<size_t>(rows));
    for (int32_t& value : values) value = static_cast<int32_t>(random() % static_cast<uint32_t>(9 * page_size));
    values[0] = 0;
    return values;
  }
  PageTableView csr(bool on_gpu) {
    PageTableView table = csr_table(indices.span(false), indptr.span(false));
    table.indices = indices.at(on_gpu);
    table.indptr = indptr.at(on_gpu);
    return table;
  }
  PageTableView dense_view(bool on_gpu) {
    return dense_table(dense.span(on_gpu), static_cast<int32_t>(kv_len.host.size()), columns);
  }

  Twin<int32_t> kv_len;
  Twin<int32_t> indptr{Ints{}}, indices{Ints{}}, dense{Ints{}}, last_page_len{Ints{}};
  int32_t columns = 0;
};

class TableOps : public CudaTest, public testing::WithParamInterface<int32_t> {
 protected:
  std::mt19937 random_{41};
  std::optional<Twin<int32_t>> status_;
  int32_t* status(bool on_gpu) { return on_gpu ? status_->at(true) : nullptr; }
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped()) status_.emplace(Ints{0});
  }
  void TearDown() override {
    if (status_.has_value()) {
      EXPECT_EQ(status_->gpu(), Ints{0});
    }
  }
};

/// Of a table as it is nothing is said; of each mistake, on a GPU, that there is one.
TEST_P(TableOps, ValidateFindsWhatTheCpuFinds) {
  const int32_t page_size = GetParam();
  Tables tables(40, page_size, random_);
  const Context gpu = Context::cuda(0);
  const int64_t num_pages = *std::ranges::max_element(tables.indices.host) + 1;
  const auto wrong = [&](const PageTableView& table, int64_t pages) {
    Twin<int32_t> word(Ints{0});
    validate(gpu, table, tables.kv_len.span(true), page_size, pages, {}, word.at(true));
    wait_for_gpu();
    return word.gpu()[0] == 1;
  };
  for (const bool csr : {true, false}) {
    const auto view = [&](bool on_gpu) { return csr ? tables.csr(on_gpu) : tables.dense_view(on_gpu); };
    EXPECT_NO_THROW(validate(Context::cpu(), view(false), tables.kv_len.host, page_size, num_pages));
    EXPECT_FALSE(wrong(view(true), num_pages));
    EXPECT_THROW(validate(Context::cpu(), view(false), tables.kv_len.host, page_size, num_pages - 1), Error);
    EXPECT_TRUE(wrong(view(true), num_pages - 1));
    PageTableView cut = view(true);
    cut.num_indices = 1;
    EXPECT_TRUE(wrong(cut, num_pages)) << "rows beyond the table's memory";
  }
  EXPECT_THROW(validate(gpu, tables.csr(true), tables.kv_len.span(true), page_size, num_pages), Error) << "no status";
}

TEST_P(TableOps, ListsAreTheCpus) {
  const int32_t page_size = GetParam();
  for (const int32_t rows : {1, 5, 700}) {
    Tables tables(rows, page_size, random_);
    const auto n = static_cast<size_t>(rows);
    const int64_t tokens = std::accumulate(tables.kv_len.host.begin(), tables.kv_len.host.end(), int64_t{0});
    const size_t pages = tables.indices.host.size();
    Twin<int32_t> indptr(Ints(n + 1, 7)), last(Ints(n, 7)), lens(Ints(n, 7)), local(Ints(n, 7));
    Twin<int32_t> csr_indptr(Ints(n + 1, 7)), csr_last(Ints(n, 7)), csr_indices(Ints(pages + 3, 7));
    Twin<int32_t> dense(Ints(n * static_cast<size_t>(tables.columns), 7));
    Twin<int32_t> token_indptr(Ints(n + 1, 7)), tokens32(Ints(static_cast<size_t>(tokens) + 2, 7));
    Twin<int32_t> offset_indptr(Ints(n + 1, 7)), expanded(Ints(pages * 3, 7));
    Twin<int64_t> offsets(std::vector<int64_t>(static_cast<size_t>(tokens), 7));
    for (const bool on_gpu : {false, true}) {
      const Context context = context_of(on_gpu);
      const std::span<const int32_t> kv_len = tables.kv_len.span(on_gpu);
      paged_indptr(context, kv_len, page_size, indptr.span(on_gpu), last.span(on_gpu), {}, status(on_gpu));
      seq_lens_from_paged(context, indptr.span(on_gpu), last.span(on_gpu), page_size, lens.span(on_gpu), {},
                          status(on_gpu));
      to_csr(context, tables.dense_view(on_gpu), kv_len, page_size, csr_indptr.span(on_gpu), csr_indices.span(on_gpu),
             csr_last.span(on_gpu), {}, status(on_gpu));
      to_dense(context, tables.csr(on_gpu), kv_len, page_size, tables.columns, -3, dense.span(on_gpu), {},
               status(on_gpu));
      token_indices(context, tables.csr(on_gpu), kv_len, page_size, token_indptr.span(on_gpu), tokens32.span(on_gpu),
                    {}, status(on_gpu));
      token_offsets(context, tables.dense_view(on_gpu), kv_len, page_size, int64_t{1} << 33, 130,
                    offset_indptr.span(on_gpu), offsets.span(on_gpu), {}, status(on_gpu));
      expand_pages(context, tables.indices.span(on_gpu), 3, expanded.span(on_gpu), {}, status(on_gpu));
      shard_lens(context, kv_len, {3, 1, 2}, local.span(on_gpu), {}, status(on_gpu));
    }
    EXPECT_TRUE(indptr.equal());
    EXPECT_TRUE(last.equal());
    EXPECT_TRUE(lens.equal());
    EXPECT_EQ(lens.host, tables.kv_len.host);
    EXPECT_TRUE(csr_indptr.equal());
    EXPECT_TRUE(csr_indices.equal());
    EXPECT_TRUE(csr_last.equal());
    EXPECT_TRUE(dense.equal());
    EXPECT_TRUE(token_indptr.equal());
    EXPECT_TRUE(tokens32.equal());
    EXPECT_TRUE(offset_indptr.equal());
    EXPECT_TRUE(offsets.equal());
    EXPECT_TRUE(expanded.equal());
    EXPECT_TRUE(local.equal());
  }
}

TEST_P(TableOps, SlotsAreTheCpus) {
  const int32_t page_size = GetParam();
  for (const KvShard& shard : {KvShard{}, KvShard{2, 1, page_size}, KvShard{3, 0, 1}}) {
    Tables tables(6, page_size, random_);
    Ints rows, positions;
    for (int32_t r = 0; r < 6; ++r) {
      for (int32_t p = 0; p < tables.kv_len.host[static_cast<size_t>(r)]; ++p) {
        rows.push_back(r);
        positions.push_back(p);
      }
      rows.push_back(1 << 30);  // padding
      positions.push_back(-1);
    }
    Twin<int32_t> token_row(rows), position(positions);
    Twin<int64_t> slots(std::vector<int64_t>(rows.size(), 7));
    for (const bool on_gpu : {false, true}) {
      slot_mapping(context_of(on_gpu), tables.dense_view(on_gpu), token_row.span(on_gpu), position.span(on_gpu),
                   page_size, slots.span(on_gpu), shard, {}, status(on_gpu));
    }
    EXPECT_TRUE(slots.equal());
  }
}

/// So many tokens that neighbours are looked up together, an odd number of them; lists that begin anywhere.
TEST_P(TableOps, ManyTokensAreTheCpus) {
  const int32_t page_size = GetParam();
  Tables tables(9001 / page_size + 90, page_size, random_);
  Ints rows, positions;
  for (size_t r = 0; r < tables.kv_len.host.size(); ++r) {
    for (int32_t p = 0; p < tables.kv_len.host[r]; ++p) {
      rows.push_back(static_cast<int32_t>(r));
      positions.push_back(random_() % 50 == 0 ? -1 : p);  // padding
    }
  }
  if (rows.size() % 2 == 0) rows.pop_back(), positions.pop_back();
  ASSERT_GT(rows.size(), size_t{1} << 13);
  Twin<int32_t> token_row(rows), position(positions), indptr(Ints(tables.kv_len.host.size() + 1));
  Twin<int64_t> slots(std::vector<int64_t>(rows.size(), 7));
  const size_t pages = tables.indices.host.size();
  Twin<int32_t> expanded(Ints(8 * pages, 7)), list(Ints(rows.size() + 8, 7));
  for (const bool on_gpu : {false, true}) {
    const Context context = context_of(on_gpu);
    slot_mapping(context, tables.csr(on_gpu), token_row.span(on_gpu), position.span(on_gpu), page_size,
                 slots.span(on_gpu), {}, {}, status(on_gpu));
    expand_pages(context, tables.indices.span(on_gpu), 8, expanded.span(on_gpu), {}, status(on_gpu));
    token_indices(context, tables.csr(on_gpu), tables.kv_len.span(on_gpu), page_size, indptr.span(on_gpu),
                  list.span(on_gpu).subspan(3), {}, status(on_gpu));
  }
  EXPECT_TRUE(slots.equal());
  EXPECT_TRUE(expanded.equal());
  EXPECT_TRUE(indptr.equal());
  EXPECT_TRUE(list.equal());
}

/// Rows of several CTAs beside short ones, lists that begin anywhere, pages that neighbours fit into or not.
TEST_F(CudaTest, LongListsAreTheCpus) {
  std::mt19937 random(43);
  const Ints lengths{20001, 0, 1, 9000, 8191, 3, 2, 16384};
  int64_t tokens = 0;
  for (const int32_t length : lengths) tokens += length;
  for (const int32_t page_size : {1, 2, 3, 4, 5, 16, 48, 4096}) {
    Ints starts(lengths.size() + 1), last(lengths.size());
    paged_indptr(lengths, page_size, starts, last);
    Ints pages(static_cast<size_t>(starts.back()));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    Twin<int32_t> kv_len(lengths), indptr(starts), indices(pages);
    for (const size_t before : {0, 1, 2, 3}) {
      Twin<int32_t> begins(Ints(lengths.size() + 1)), begins64(begins.host), status(Ints{0});
      Twin<int32_t> list(Ints(static_cast<size_t>(tokens) + before, 7));
      Twin<int64_t> offsets(std::vector<int64_t>(list.host.size(), 7));
      for (const bool on_gpu : {false, true}) {
        PageTableView table = csr_table(indices.span(false), indptr.span(false));
        table.indices = indices.at(on_gpu);
        table.indptr = indptr.at(on_gpu);
        int32_t* const found = on_gpu ? status.at(true) : nullptr;
        token_indices(context_of(on_gpu), table, kv_len.span(on_gpu), page_size, begins.span(on_gpu),
                      list.span(on_gpu).subspan(before), {}, found);
        token_offsets(context_of(on_gpu), table, kv_len.span(on_gpu), page_size, int64_t{1} << 40, 3,
                      begins64.span(on_gpu), offsets.span(on_gpu).subspan(before), {}, found);
      }
      EXPECT_TRUE(begins.equal() && list.equal()) << "pages of " << page_size << ", " << before << " in front";
      EXPECT_TRUE(begins64.equal() && offsets.equal()) << "pages of " << page_size << ", " << before << " in front";
      EXPECT_EQ(status.gpu(), Ints{0});
    }
  }
}

/// Where one of a page's entries does not fit, each that does is written, and the others are 0.
TEST_F(CudaTest, IndicesThatDoNotFitAreReported) {
  constexpr int32_t kPage = 16, kHuge = INT32_MAX / kPage;  // its last token is INT32_MAX
  Twin<int32_t> kv_len(Ints{70}), indptr(Ints{0, 5}), indices(Ints{3, kHuge, kHuge + 1, -1, 4}), begins(Ints(2));
  Twin<int32_t> list(Ints(72, 7)), status(Ints{0});
  PageTableView table = csr_table(indices.span(false), indptr.span(false));
  table.indices = indices.at(true);
  table.indptr = indptr.at(true);
  token_indices(Context::cuda(0), table, kv_len.span(true), kPage, begins.span(true), list.span(true).subspan(1), {},
                status.at(true));
  EXPECT_EQ(status.gpu(), Ints{1});
  Ints expected{7};
  for (int32_t t = 0; t < 70; ++t) {
    const int32_t page = indices.host[static_cast<size_t>(t / kPage)];
    expected.push_back(page == kHuge + 1 ? 0 : page * kPage + t % kPage);
  }
  expected.push_back(7);
  EXPECT_EQ(list.gpu(), expected);
  // Too little memory for the list: what fits is written.
  Twin<int32_t> shorter(Ints(40, 7)), again(Ints{0});
  indices = Twin<int32_t>(Ints{3, 9, 5, 6, 4});
  table.indices = indices.at(true);
  token_indices(Context::cuda(0), table, kv_len.span(true), kPage, begins.span(true), shorter.span(true).first(33), {},
                again.at(true));
  EXPECT_EQ(again.gpu(), Ints{1});
  for (int32_t t = 0; t < 40; ++t) {
    const int32_t page = indices.host[static_cast<size_t>(t / kPage)];
    EXPECT_EQ(shorter.gpu()[static_cast<size_t>(t)], t < 33 ? page * kPage + t % kPage : 7) << t;
  }
}

INSTANTIATE_TEST_SUITE_P(PageSizes, TableOps, testing::Values(1, 3, 16), testing::PrintToStringParamName());

TEST_F(CudaTest, TablesOutOfRangeAreReported) {
  const Context context = Context::cuda(0);
  Twin<int32_t> lens(Ints{5, -1, 40}), indptr(Ints{0, 1, 1, 3}), indices(Ints{3, INT32_MAX, 9});
  PageTableView table;
  table.indices = indices.at(true);
  table.num_indices = 3;
  table.indptr = indptr.at(true);
  table.num_rows = 3;
  const auto reports = [&](const auto& call) {
    Twin<int32_t> status(Ints{0});
    call(status.at(true));
    return status.gpu()[0] == 1;
  };
  Twin<int32_t> out_indptr(Ints(4)), out_last(Ints(3)), out(Ints(4, 7));
  EXPECT_TRUE(reports([&](int32_t* status) {
    to_csr(context, table, lens.span(true), 16, out_indptr.span(true), out.span(true), out_last.span(true), {}, status);
  }));
  EXPECT_EQ(out_indptr.gpu(), (Ints{0, 1, 1, 4}));
  EXPECT_EQ(out.gpu(), (Ints{3, INT32_MAX, 9, 0}));  // the row has two of three pages
  Twin<int32_t> shorter(Ints(2, 7));
  EXPECT_TRUE(reports([&](int32_t* status) {
    to_csr(context, table, lens.span(true), 16, out_indptr.span(true), shorter.span(true), out_last.span(true), {},
           status);
  }));
  Twin<int32_t> rows(Ints{0, 3, -1, 0, 2}), positions(Ints{15, 0, 0, 16, 3});
  Twin<int64_t> slots(std::vector<int64_t>(5, 7));
  EXPECT_TRUE(reports([&](int32_t* status) {
    slot_mapping(context, table, rows.span(true), positions.span(true), 16, slots.span(true), {}, {}, status);
  }));
  EXPECT_EQ(slots.gpu(), (std::vector<int64_t>{63, -1, -1, -1, int64_t{INT32_MAX} * 16 + 3}));
  Twin<int32_t> expanded(Ints(6));
  EXPECT_TRUE(
      reports([&](int32_t* status) { expand_pages(context, indices.span(true), 2, expanded.span(true), {}, status); }));
  EXPECT_EQ(expanded.gpu(), (Ints{6, 7, -1, -1, 18, 19}));
}

TEST_F(CudaTest, DequantisesPagesInUseAsTheCpu) {
  std::mt19937 random(51);
  for (const DType stored : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const DType wide : {DType::kFloat16, DType::kBFloat16}) {
      const KvCacheShape shape{60, 16, 2, 32, 20, stored};
      Bytes k(random_elements(stored, k_elements(shape), random)),
          v(random_elements(stored, v_elements(shape), random));
      Tables tables(7, 16, random);
      for (int32_t& page : tables.dense.host) page = page < 0 ? page : page % 60;
      tables.dense = Twin<int32_t>(tables.dense.host);
      KvCacheShape mock_shape = shape;
      mock_shape.dtype = wide;
      mock_shape.num_pages = backends::num_dequantized_pages(tables.kv_len.host, 16);
      Bytes mock_k(random_elements(wide, k_elements(mock_shape), random));
      Bytes mock_v(random_elements(wide, v_elements(mock_shape), random));
      Twin<int32_t> mock_table(Ints(tables.dense.host.size(), 7)), status(Ints{0});
      for (const bool on_gpu : {false, true}) {
        backends::BlockTableView table;
        table.data = tables.dense.at(on_gpu);
        table.num_rows = 7;
        table.num_columns = tables.columns;
        table.row_stride = tables.columns;
        backends::trtllm_prefill_attn_kvfp8_dequant(
            context_of(on_gpu), make_nhd_view(shape, k.at(on_gpu), v.at(on_gpu)), table, tables.kv_len.span(on_gpu),
            0.3f, 1.7f, make_hnd_view(mock_shape, mock_k.at(on_gpu), mock_v.at(on_gpu)), mock_table.span(on_gpu), {},
            on_gpu ? status.at(true) : nullptr);
      }
      EXPECT_TRUE(mock_table.equal());
      EXPECT_TRUE(mock_k.equal());
      EXPECT_TRUE(mock_v.equal());
      EXPECT_EQ(status.gpu(), Ints{0});
    }
  }
}

TEST_F(CudaTest, ConcatenatesKeysAsTheCpu) {
  std::mt19937 random(61);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const int64_t nope : {128, 20, 3}) {
      for (const bool in_place : {false, true}) {
        const int64_t rope = nope / 2, tokens = 19, heads = 3, dim = nope + rope;
        Bytes k(random_elements(dtype, tokens * heads * dim, random));
        Bytes k_nope(random_elements(dtype, tokens * heads * nope, random));
        Bytes k_pe(random_elements(dtype, tokens * rope, random));
        for (const bool on_gpu : {false, true}) {
          const TensorView to(k.at(on_gpu), dtype, {tokens, heads, dim});
          ConstTensorView from(k_nope.at(on_gpu), dtype, {tokens, heads, nope});
          if (in_place) {
            from = to;
            from.shape[2] = nope;
          }
          backends::concat_mla_k(context_of(on_gpu), to, from,
                                 ConstTensorView(k_pe.at(on_gpu), dtype, {tokens, 1, rope}));
        }
        EXPECT_TRUE(k.equal()) << to_string(dtype) << " " << nope;
      }
    }
  }
}

TEST_F(CudaTest, ScalesOfAFirstBatchAreTheCpus) {
  std::mt19937 random(71);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    Bytes q(random_elements(dtype, 37 * 4 * 64, random)), k(random_elements(dtype, 37 * 2 * 15, random));
    Bytes v(random_elements(dtype, 16, random));
    for (std::byte& byte : v.host) byte = std::byte{0};
    store_from_float(k.host.data(), dtype, 17, std::numeric_limits<float>::quiet_NaN());
    k = Bytes(k.host);
    v = Bytes(v.host);
    Twin<float> scales(std::vector<float>(3, 7.0f));
    for (const bool on_gpu : {false, true}) {
      ConstTensorView k_view(k.at(on_gpu), dtype, {37, 2, 10});
      k_view.strides = {30, 15, 1};
      backends::calculate_kv_scales(context_of(on_gpu), ConstTensorView(q.at(on_gpu), dtype, {37, 4, 64}), k_view,
                                    ConstTensorView(v.at(on_gpu), dtype, {16}), scales.span(on_gpu));
    }
    const std::vector<float> gpu = scales.gpu();
    EXPECT_EQ(gpu[0], scales.host[0]);
    EXPECT_EQ(gpu[2], 1.0f);
    EXPECT_EQ(std::isnan(gpu[1]), std::isnan(scales.host[1]));
  }
}

/// Everything that a captured step may need besides attention, captured: replays read what stands in memory then.
TEST_F(CudaTest, FunctionsCanBeCaptured) {
  std::mt19937 random(81);
  const Context context = Context::cuda(0);
  const TestStream stream;
  const KvCacheShape shape{8, 16, 2, 16, 16, DType::kBFloat16};
  Bytes k_cache(random_elements(shape.dtype, k_elements(shape), random)), v_cache(k_cache.host);
  Bytes k(random_elements(shape.dtype, 4 * 32, random)), k_out(random_elements(shape.dtype, 4 * 32, random));
  Bytes v_out(k_out.host);
  Twin<int32_t> rows(Ints{0, 0, 0, 0}), positions(Ints{0, 1, 2, 3}), kv_len(Ints{4}), indptr(Ints{0, 1}), page(Ints{6});
  Twin<int64_t> slots(std::vector<int64_t>(4, -1));
  PageTableView table;
  table.indices = page.at(true);
  table.num_indices = 1;
  table.indptr = indptr.at(true);
  table.num_rows = 1;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal));
  slot_mapping(context, table, rows.span(true), positions.span(true), 16, slots.span(true), {}, stream.get());
  CacheWriteArgs args;
  args.k = args.v = ConstTensorView(k.at(true), shape.dtype, {4, 2, 16});
  args.slot_mapping = slots.at(true);
  args.num_slots = 4;
  args.cache = make_nhd_view(shape, k_cache.at(true), v_cache.at(true));
  write_kv_cache(context, args, stream.get());
  gather_kv(context, args.cache, table, kv_len.span(true), TensorView(k_out.at(true), shape.dtype, {4, 2, 16}),
            TensorView(v_out.at(true), shape.dtype, {4, 2, 16}), {}, {}, stream.get());
  check(cudaStreamEndCapture(stream.native(), &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  for (const int32_t id : {6, 1}) {
    check(cudaMemcpy(page.at(true), &id, sizeof(id), cudaMemcpyHostToDevice));
    check(cudaMemset(k_out.at(true), 0, k_out.host.size()));
    check(cudaGraphLaunch(executable, stream.native()));
    stream.wait();
    EXPECT_EQ(slots.gpu()[3], id * 16 + 3);
    EXPECT_EQ(k_out.gpu(), k.host);
    EXPECT_EQ(v_out.gpu(), k.host);
  }
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace folio::cuda_test
