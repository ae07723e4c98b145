#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <limits>

#include "attention/cache_test_util.hpp"
#include "core/expect_refused_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

using folio::testing::expect_refused;

const std::vector<float> kRequestAndHeadScales{0.5f, 2.0f, 3.0f, -9.0f, 1.0f, 0.25f, 7.0f, -9.0f, 1.5f, 2.5f, 0.1f};

/// The gather of one half, one element after the other.
void gather_plainly(const KvCacheView& c, bool is_k, const std::vector<int32_t>& indices,
                    const std::vector<int32_t>& indptr, const std::vector<int32_t>& kv_len, Rows& out,
                    const Scale& scale) {
  int64_t target = 0;
  for (size_t r = 0; r < kv_len.size(); ++r) {
    for (int32_t t = 0; t < kv_len[r]; ++t, ++target) {
      const int64_t page = indices[static_cast<size_t>(indptr[r] + t / c.page_size)];
      const int64_t token = t % c.page_size;
      for (int64_t h = 0; h < out.heads; ++h) {
        const float from_scale = out.dtype == c.dtype ? 1.0f : scale_of(scale, static_cast<int64_t>(r), h);
        for (int64_t d = 0; d < out.dim; ++d) {
          move_element(is_k ? c.k : c.v, c.dtype, is_k ? k_index(c, page, token, h, d) : v_index(c, page, token, h, d),
                       from_scale, out.memory.data(), out.dtype, out.index(target, h, d), 1.0f);
        }
      }
    }
  }
}

TEST(GatherKv, EveryTypeAndLayout) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
  uint32_t seed = 1;
  int number = 0;
  for (DType cache_type : kCacheDTypes) {
    for (Layout layout : kLayouts) {
      for (int32_t page_size : {1, 16, 22}) {
        const KvCacheShape shape{40, page_size, 3, 24, 16, cache_type};
        if (!exists(layout, shape)) continue;
        Pool pool = pool_of_numbers(layout, shape, seed);
        const std::vector<int32_t> kv_len{page_size, 0, 2 * page_size + (page_size > 1 ? 5 : 0), 1};
        std::vector<int32_t> indptr(5), last(4);
        paged_indptr(kv_len, page_size, indptr, last);
        std::vector<int32_t> indices(static_cast<size_t>(indptr[4]));
        for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int32_t>(37 - 5 * i);
        const std::vector<int32_t> dense = to_dense(csr_table(indices, indptr), kv_len, page_size, 6, -1);
        const int64_t tokens = std::accumulate(kv_len.begin(), kv_len.end(), int64_t{0});
        for (DType out_type : kCacheDTypes) {
          if (is_fp8(out_type) && out_type != cache_type) continue;
          if (folio::testing::kInstrumented && number++ % 5 != 0) continue;
          Scale k_scale, v_scale;
          if (is_fp8(cache_type) && out_type != cache_type) {
            k_scale.value = 0.3f;
            v_scale = {1.0f, kHeadScales.data(), ScaleGranularity::kPerHead, 0};
            if (seed % 3 == 1) v_scale = {1.0f, kRequestAndHeadScales.data(), ScaleGranularity::kPerRequestAndHead, 0};
          }
          Rows k_out(out_type, tokens, 3, 24, 7, seed), v_out(out_type, tokens, 3, 16, 0, seed + 1);
          Rows k_expected = k_out;
          Rows v_expected = v_out;
          gather_plainly(pool.view(), true, indices, indptr, kv_len, k_expected, k_scale);
          gather_plainly(pool.view(), false, indices, indptr, kv_len, v_expected, v_scale);
          const PageTableView table = seed % 2 == 0 ? csr_table(indices, indptr) : dense_table(dense, 4, 6);
          gather_kv(context, pool.view(), table, kv_len, k_out.view(), v_out.view(), k_scale, v_scale);
          ASSERT_EQ(k_out.memory, k_expected.memory) << to_string(cache_type) << " to " << to_string(out_type);
          ASSERT_EQ(v_out.memory, v_expected.memory) << to_string(cache_type) << " to " << to_string(out_type);
          ++seed;
        }
      }
    }
  }
}

TEST(GatherKv, ScalesPerRequestAndHead) {
  const Context context = Context::cpu();
  const KvCacheShape shape{3, 4, 3, 8, 8, DType::kFloat8E5M2};
  Pool pool = pool_of_numbers(Layout::kHnd, shape, 3);
  const std::vector<int32_t> kv_len{4, 1, 3}, indptr{0, 1, 2, 3}, indices{2, 0, 1};
  Rows k_out(DType::kBFloat16, 8, 3, 8, 0, 1), v_out(DType::kFloat32, 8, 3, 8, 0, 2);
  Rows k_expected = k_out;
  Rows v_expected = v_out;
  const std::vector<float> per_request{0.5f, 3.0f, 0.125f};
  const Scale k_scale{1.0f, kRequestAndHeadScales.data(), ScaleGranularity::kPerRequestAndHead, 4};
  const Scale v_scale{1.0f, per_request.data(), ScaleGranularity::kPerRequest, 0};
  gather_plainly(pool.view(), true, indices, indptr, kv_len, k_expected, k_scale);
  gather_plainly(pool.view(), false, indices, indptr, kv_len, v_expected, v_scale);
  gather_kv(context, pool.view(), csr_table(indices, indptr), kv_len, k_out.view(), v_out.view(), k_scale, v_scale);
  EXPECT_EQ(k_out.memory, k_expected.memory);
  EXPECT_EQ(v_out.memory, v_expected.memory);
}

/// Written through a slot mapping, gathered through the page table: the tokens come back in their order.
TEST(GatherKv, ReadsWhatWasWritten) {
  OrderedExecutor reverse(OrderedExecutor::Order::kReverse, 8);
  OrderedExecutor shuffled(OrderedExecutor::Order::kShuffled, 33);
  const Context contexts[] = {reverse.context(), shuffled.context(),
                              Context::cpu({.executor = {}, .num_threads = 3, .force_kernel = {}})};
  uint32_t seed = 50;
  int number = 0;
  for (const Context& context : contexts) {
    for (Layout layout : kLayouts) {
      for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
        if (folio::testing::kInstrumented && number++ % 3 != 0) continue;
        const std::vector<int32_t> kv_len{150, 0, 1, 16, 97};
        std::vector<int32_t> indptr(6), last(5);
        paged_indptr(kv_len, 16, indptr, last);
        std::vector<int32_t> indices(30);
        std::iota(indices.begin(), indices.end(), 0);
        std::shuffle(indices.begin(), indices.end(), std::mt19937(seed));
        const PageTableView table = csr_table(indices, indptr);
        std::vector<int32_t> rows, positions;
        for (int32_t r = 0; r < 5; ++r) {
          for (int32_t p = 0; p < kv_len[static_cast<size_t>(r)]; ++p) {
            rows.push_back(r);
            positions.push_back(p);
          }
        }
        std::vector<int64_t> slots(rows.size());
        slot_mapping(table, rows, positions, 16, slots);
        Pool pool(layout, {30, 16, 2, 64, 32, dtype}, seed);
        const auto tokens = static_cast<int64_t>(slots.size());
        Rows k(dtype, tokens, 2, 64, 0, seed), v(dtype, tokens, 2, 32, 0, seed + 1);
        CacheWriteArgs args;
        args.k = k.view();
        args.v = v.view();
        args.slot_mapping = slots.data();
        args.num_slots = tokens;
        args.cache = pool.view();
        write_kv_cache(context, args);
        Rows k_out(dtype, tokens, 2, 64, 0, seed + 2), v_out(dtype, tokens, 2, 32, 0, seed + 3);
        gather_kv(context, pool.view(), table, kv_len, k_out.view(), v_out.view());
        ASSERT_EQ(k_out.memory, k.memory);
        ASSERT_EQ(v_out.memory, v.memory);
        ++seed;
      }
    }
  }
  EXPECT_GT(shuffled.most_items, 1);
}

/// Address space without memory, of which single pages are made accessible.
class Reservation {
 public:
  explicit Reservation(size_t bytes)
      : bytes_(bytes), base_(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reservation() {
    if (valid()) munmap(base_, bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  bool valid() const { return base_ != MAP_FAILED; }
  std::byte* data() const { return static_cast<std::byte*>(base_); }
  void open(int64_t begin, int64_t end) const {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t first = begin / page * page;
    ASSERT_EQ(mprotect(data() + first, static_cast<size_t>(end - first), PROT_READ | PROT_WRITE), 0);
  }

 private:
  size_t bytes_;
  void* base_;
};

/// Slots, pages and strides beyond 2^31: every other address would fault.
TEST(GatherKv, PoolsBeyond32Bits) {
  const Context context = Context::cpu();
  for (Layout layout : {Layout::kNhd, Layout::kHnd, Layout::kPacked}) {
    const int64_t pages = (int64_t{1} << 28) + 3;  // times 16 tokens of 16 bytes: 2^36 elements
    const KvCacheShape shape{pages, 16, 2, 8, 8, DType::kFloat8E4M3};
    const int64_t half = k_elements(shape);
    const Reservation memory(static_cast<size_t>(2 * half));
    if (!memory.valid()) GTEST_SKIP() << "no address space for a pool of " << 2 * half << " bytes";
    std::byte* v = memory.data() + half;
    const KvCacheView cache = layout == Layout::kNhd   ? make_nhd_view(shape, memory.data(), v)
                              : layout == Layout::kHnd ? make_hnd_view(shape, memory.data(), v)
                                                       : make_cpu_packed_view(shape, memory.data(), v);
    const std::vector<int32_t> ids{static_cast<int32_t>(pages - 1), 1 << 27};
    for (int64_t id : ids) {
      memory.open(id * 256, id * 256 + 256);
      memory.open(half + id * 256, half + id * 256 + 256);
    }
    const std::vector<int64_t> slots{int64_t{ids[0]} * 16, (int64_t{1} << 31), int64_t{ids[0]} * 16 + 1};
    Rows k(DType::kFloat8E4M3, 3, 2, 8, 0, 1), v_rows(DType::kFloat8E4M3, 3, 2, 8, 0, 2);
    CacheWriteArgs args;
    args.k = k.view();
    args.v = v_rows.view();
    args.slot_mapping = slots.data();
    args.num_slots = 3;
    args.cache = cache;
    write_kv_cache(context, args);
    const std::vector<int32_t> indptr{0, 1, 2}, kv_len{2, 1};
    Rows k_out(DType::kFloat8E4M3, 3, 2, 8, 0, 3), v_out(DType::kFloat8E4M3, 3, 2, 8, 0, 4);
    gather_kv(context, cache, csr_table(ids, indptr), kv_len, k_out.view(), v_out.view());
    const auto token = [](const Rows& rows, int64_t t) {
      return std::vector<std::byte>(rows.memory.begin() + t * 16, rows.memory.begin() + t * 16 + 16);
    };
    EXPECT_EQ(token(k_out, 0), token(k, 0));
    EXPECT_EQ(token(k_out, 1), token(k, 2));
    EXPECT_EQ(token(k_out, 2), token(k, 1));
    EXPECT_EQ(token(v_out, 1), token(v_rows, 2));
    EXPECT_EQ(token(v_out, 2), token(v_rows, 1));
    // A copy of a page from one end to the other.
    copy_pages(context, cache, cache, std::vector<int32_t>{ids[0]}, std::vector<int32_t>{ids[1]});
    EXPECT_EQ(std::memcmp(memory.data() + int64_t{ids[0]} * 256, memory.data() + int64_t{ids[1]} * 256, 256), 0);
  }
}

TEST(GatherKv, Refuses) {
  const Context context = Context::cpu();
  Pool pool(Layout::kNhd, {8, 16, 3, 24, 16, DType::kFloat16}, 1);
  Rows k(DType::kFloat32, 18, 3, 24, 0, 2), v(DType::kFloat32, 18, 3, 16, 0, 3);
  const auto before = k.memory;
  std::vector<int32_t> indices{1, 2, 7}, indptr{0, 2, 3}, kv_len{17, 1};
  const auto gather = [&](TensorView k_out, TensorView v_out, Scale k_scale = {}) {
    gather_kv(context, pool.view(), csr_table(indices, indptr), kv_len, k_out, v_out, k_scale);
  };
  const auto changed = [](TensorView view, auto change) {
    change(view);
    return view;
  };
  expect_refused("k_out is [18, 3, 16]", [&] { gather(v.view(), v.view()); });
  expect_refused("k_out has 17 tokens; the rows have 18",
                 [&] { gather(changed(k.view(), [](auto& t) { t.shape[0] = 17; }), v.view()); });
  expect_refused("k_out's rows overlap",
                 [&] { gather(changed(k.view(), [](auto& t) { t.strides[0] = 71; }), v.view()); });
  expect_refused("k_out.data is null", [&] { gather(changed(k.view(), [](auto& t) { t.data = nullptr; }), v.view()); });
  expect_refused("k_out is fp8_e4m3, the cache float16",
                 [&] { gather(changed(k.view(), [](auto& t) { t.dtype = DType::kFloat8E4M3; }), v.view()); });
  expect_refused("k_out and v_out overlap",
                 [&] { gather(k.view(), changed(v.view(), [&](auto& t) { t.data = k.memory.data() + 64; })); });
  expect_refused("v_out overlaps the cache",
                 [&] { gather(k.view(), changed(v.view(), [&](auto& t) { t.data = pool.view().k; })); });
  expect_refused("k_scale is given, but the cache is not fp8", [&] {
    Scale scale;
    scale.value = 2.0f;
    gather(k.view(), v.view(), scale);
  });
  indices[2] = 8;
  expect_refused("row 1, column 0 of the table is page 8", [&] { gather(k.view(), v.view()); });
  indices[2] = 7;
  kv_len[0] = 33;
  expect_refused("row 0 needs 3 pages", [&] { gather(k.view(), v.view()); });
  EXPECT_EQ(k.memory, before);
  kv_len = {17, 1};
  EXPECT_NO_THROW(gather(k.view(), v.view()));
}

}  // namespace
}  // namespace folio::inline v0::attention
