// Writes, gathers and conversions of pages on a GPU leave the bytes that they leave on a CPU.
#include <numeric>

#include "folio/types/ds_mla.hpp"
#include "twin_array.hpp"

namespace folio::cuda_test {
namespace {

enum class Layout { kNhd, kHnd, kSideBySide, kPacked };
constexpr Layout kLayouts[] = {Layout::kNhd, Layout::kHnd, Layout::kSideBySide, Layout::kPacked};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                             DType::kFloat8E5M2};

KvCacheView view_of(Layout layout, const KvCacheShape& shape, std::byte* memory) {
  std::byte* const v = memory + k_elements(shape) * size_of(shape.dtype);
  if (layout == Layout::kNhd) return make_nhd_view(shape, memory, v);
  if (layout == Layout::kPacked) return make_cpu_packed_view(shape, memory, v);
  KvCacheView cache = make_hnd_view(shape, memory, v);
  if (layout == Layout::kHnd) return cache;
  const int64_t both = int64_t{shape.head_dim_qk} + shape.head_dim_v;
  cache.v = memory + shape.head_dim_qk * size_of(shape.dtype);
  cache.k_strides = cache.v_strides = {
      .page = shape.page_size * shape.num_kv_heads * both, .token = both, .head = shape.page_size * both};
  return cache;
}

struct Pool {
  Pool(Layout l, const KvCacheShape& s, std::mt19937& random)
      : layout(l), shape(s), memory(random_elements(s.dtype, k_elements(s) + v_elements(s), random)) {}
  KvCacheView view(bool on_gpu) { return view_of(layout, shape, memory.at(on_gpu)); }
  Layout layout;
  KvCacheShape shape;
  Bytes memory;
};

/// A tensor [tokens, heads, dim] whose tokens lie `gap` elements further apart than they need.
struct Rows {
  Rows(DType type, int64_t t, int64_t h, int64_t d, int64_t g, std::mt19937& random)
      : dtype(type),
        tokens(t),
        heads(h),
        dim(d),
        gap(g),
        memory(random_elements(type, t * (h * d + g), random, 200.0f)) {}
  TensorView view(bool on_gpu) {
    TensorView tensor(memory.at(on_gpu), dtype, {tokens, heads, dim});
    tensor.strides[0] = heads * dim + gap;
    return tensor;
  }
  DType dtype;
  int64_t tokens, heads, dim, gap;
  Bytes memory;
};

/// Dimensions with pieces of 16 bytes of every type, and dimensions without.
struct Sizes {
  int32_t dim_qk, dim_v;
  int64_t gap;
};
constexpr Sizes kSizes[] = {{64, 32, 0}, {24, 40, 8}, {20, 12, 3}};

bool exists(Layout layout, const KvCacheShape& shape) {
  return layout != Layout::kPacked || shape.dtype != DType::kFloat32;
}

bool can_convert(DType from, DType to) {
  return !is_fp8(from) || from == to;
}

class CacheMoves : public CudaTest, public testing::WithParamInterface<DType> {
 protected:
  std::mt19937 random_{11};
};

TEST_P(CacheMoves, WritesAsTheCpu) {
  constexpr int32_t kHeads = 3;
  constexpr int64_t kTokens = 70;
  for (const DType input : kDTypes) {
    for (const Layout layout : kLayouts) {
      for (const Sizes& sizes : kSizes) {
        const KvCacheShape shape{9, 16, kHeads, sizes.dim_qk, sizes.dim_v, GetParam()};
        if (!exists(layout, shape) || !can_convert(input, shape.dtype)) continue;
        Pool pool(layout, shape, random_);
        Rows k(input, kTokens, kHeads, sizes.dim_qk, sizes.gap, random_);
        Rows v(input, kTokens, kHeads, sizes.dim_v, 0, random_);
        std::vector<int64_t> order(static_cast<size_t>(shape.num_pages * 16));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random_);
        order.resize(kTokens);
        for (size_t i = 0; i < order.size(); i += 7) order[i] = -1 - static_cast<int64_t>(i);
        Twin<int64_t> slots(order);
        Twin<float> scales(std::vector<float>{0.5f, 2.0f, 3.0f});
        for (const bool on_gpu : {false, true}) {
          CacheWriteArgs args;
          args.k = k.view(on_gpu);
          args.v = v.view(on_gpu);
          args.slot_mapping = slots.at(on_gpu);
          args.num_slots = kTokens;
          args.cache = pool.view(on_gpu);
          if (is_fp8(shape.dtype) && input != shape.dtype) {
            args.k_scale = {1.0f, scales.at(on_gpu), ScaleGranularity::kPerHead, 0};
            args.v_scale.value = 0.3f;
          }
          write_kv_cache(context_of(on_gpu), args);
        }
        ASSERT_TRUE(pool.memory.equal()) << to_string(input) << " layout " << static_cast<int>(layout) << " dim "
                                         << sizes.dim_qk;
      }
    }
  }
}

TEST_P(CacheMoves, GathersAsTheCpu) {
  constexpr int32_t kHeads = 3;
  for (const DType output : kDTypes) {
    for (const Layout layout : kLayouts) {
      for (const Sizes& sizes : kSizes) {
        const KvCacheShape shape{40, 16, kHeads, sizes.dim_qk, sizes.dim_v, GetParam()};
        if (!exists(layout, shape) || (is_fp8(output) && output != shape.dtype)) continue;
        Pool pool(layout, shape, random_);
        const std::vector<int32_t> lengths{16, 0, 37, 1, 0, 100};
        std::vector<int32_t> starts(7), last(6);
        paged_indptr(lengths, 16, starts, last);
        std::vector<int32_t> pages(static_cast<size_t>(starts[6]));
        for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(39 - 3 * i);
        Twin<int32_t> kv_len(lengths), indptr(starts), indices(pages);
        Twin<int32_t> dense(to_dense(csr_table(pages, starts), lengths, 16, 9, -1));
        Rows k_out(output, 154, kHeads, sizes.dim_qk, sizes.gap, random_);
        Rows v_out(output, 154, kHeads, sizes.dim_v, 0, random_);
        Twin<float> scales(std::vector<float>(6 * kHeads, 0.37f));
        for (const bool on_gpu : {false, true}) {
          Scale k_scale, v_scale;
          if (is_fp8(shape.dtype) && output != shape.dtype) {
            k_scale = {1.0f, scales.at(on_gpu), ScaleGranularity::kPerRequestAndHead, kHeads};
            v_scale.value = 0.029f;
          }
          PageTableView table = csr_table(indices.span(false), indptr.span(false));
          table.indices = indices.at(on_gpu);
          table.indptr = indptr.at(on_gpu);
          if (layout == Layout::kHnd) {
            table = dense_table(dense.span(on_gpu), 6, 9);
          }
          gather_kv(context_of(on_gpu), pool.view(on_gpu), table, kv_len.span(on_gpu), k_out.view(on_gpu),
                    v_out.view(on_gpu), k_scale, v_scale);
        }
        ASSERT_TRUE(k_out.memory.equal()) << to_string(output) << " layout " << static_cast<int>(layout);
        ASSERT_TRUE(v_out.memory.equal()) << to_string(output) << " layout " << static_cast<int>(layout);
      }
    }
  }
}

TEST_P(CacheMoves, ConvertsPagesAsTheCpu) {
  constexpr int32_t kHeads = 2;
  for (const DType to_type : kDTypes) {
    for (const Layout from_layout : kLayouts) {
      for (const Layout to_layout : kLayouts) {
        const Sizes& sizes = kSizes[from_layout == to_layout ? 1 : 0];
        const KvCacheShape from_shape{7, 16, kHeads, sizes.dim_qk, sizes.dim_v, GetParam()};
        const KvCacheShape to_shape{9, 16, kHeads, sizes.dim_qk, sizes.dim_v, to_type};
        if (!exists(from_layout, from_shape) || !exists(to_layout, to_shape)) continue;
        Pool from(from_layout, from_shape, random_), to(to_layout, to_shape, random_);
        Twin<int32_t> source(std::vector<int32_t>{3, 0, 6, 3}), destination(std::vector<int32_t>{8, 2, 0, 1});
        Twin<float> scales(std::vector<float>{0.5f, 3.0f});
        for (const bool on_gpu : {false, true}) {
          CacheConvertScales given;
          if (is_fp8(from_shape.dtype)) given.from_k = {1.0f, scales.at(on_gpu), ScaleGranularity::kPerHead, 0};
          if (is_fp8(to_type)) given.to_v.value = 1.7f;
          convert_pages(context_of(on_gpu), from.view(on_gpu), to.view(on_gpu), source.span(on_gpu),
                        destination.span(on_gpu), given);
          if (to_type == from_shape.dtype && from_layout == to_layout) {
            copy_pages(context_of(on_gpu), from.view(on_gpu), to.view(on_gpu), source.span(on_gpu).first(2),
                       destination.span(on_gpu).first(2));
          }
        }
        ASSERT_TRUE(to.memory.equal()) << to_string(to_type) << " from layout " << static_cast<int>(from_layout)
                                       << " to " << static_cast<int>(to_layout);
        ASSERT_TRUE(from.memory.equal());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CacheMoves, testing::ValuesIn(kDTypes),
                         [](const auto& dtype) { return std::string(to_string(dtype.param)); });

/// Rows of fp8_ds_mla: written, copied, gathered, converted.
TEST_F(CudaTest, RowsOfDsMlaAsTheCpu) {
  constexpr int64_t kPages = 9;
  constexpr int32_t kPageSize = 16;
  constexpr int64_t kTokens = 70;
  std::mt19937 random(13);
  const auto ds_mla = [&](Bytes& memory, bool on_gpu) {
    return make_fp8_ds_mla_view(kPages, kPageSize, memory.at(on_gpu));
  };
  const auto noise = [&] {
    std::vector<std::byte> bytes(kPages * kPageSize * kDsMlaRowBytes);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
  };
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t gap : {int64_t{0}, int64_t{3}}) {
      Bytes rows(noise());
      Rows k(dtype, kTokens, 1, kDsMlaHeadDimQk, gap, random);
      store_from_float(k.memory.host.data(), dtype, 5, INFINITY);
      k.memory = Bytes(k.memory.host);
      std::vector<int64_t> order(kPages * kPageSize);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      order.resize(kTokens);
      order[11] = -1;
      Twin<int64_t> slots(order);
      for (const bool on_gpu : {false, true}) {
        CacheWriteArgs args;
        args.k = k.view(on_gpu);
        args.v = ConstTensorView(nullptr, dtype, {kTokens, 1, kDsMlaLatentDim});
        args.slot_mapping = slots.at(on_gpu);
        args.num_slots = kTokens;
        args.cache = ds_mla(rows, on_gpu);
        write_kv_cache(context_of(on_gpu), args);
      }
      ASSERT_TRUE(rows.equal()) << to_string(dtype);

      // Of rows that are whole, so that there is no NaN.
      Twin<int64_t> all(std::vector<int64_t>([&] {
        std::vector<int64_t> every(kPages * kPageSize);
        std::iota(every.begin(), every.end(), 0);
        return every;
      }()));
      Rows many(dtype, kPages * kPageSize, 1, kDsMlaHeadDimQk, gap, random);
      Bytes other(noise());
      for (const bool on_gpu : {false, true}) {
        CacheWriteArgs args;
        args.k = many.view(on_gpu);
        args.v = ConstTensorView(nullptr, dtype, {kPages * kPageSize, 1, kDsMlaLatentDim});
        args.slot_mapping = all.at(on_gpu);
        args.num_slots = kPages * kPageSize;
        args.cache = ds_mla(rows, on_gpu);
        write_kv_cache(context_of(on_gpu), args);
      }
      const KvCacheShape shape{kPages, kPageSize, 1, kDsMlaHeadDimQk, kDsMlaLatentDim, dtype};
      Pool strided(Layout::kNhd, shape, random);
      Twin<int32_t> source(std::vector<int32_t>{3, 0, 6}), destination(std::vector<int32_t>{8, 2, 0});
      const std::vector<int32_t> lengths{16, 37}, starts{0, 1, 4}, pages{7, 1, 5, 0};
      Twin<int32_t> kv_len(lengths), indptr(starts), indices(pages);
      Rows k_out(dtype, 53, 1, kDsMlaHeadDimQk, gap, random), v_out(dtype, 53, 1, kDsMlaLatentDim, 0, random);
      for (const bool on_gpu : {false, true}) {
        const Context context = context_of(on_gpu);
        copy_pages(context, ds_mla(rows, on_gpu), ds_mla(other, on_gpu), source.span(on_gpu), destination.span(on_gpu));
        PageTableView table = csr_table(indices.span(false), indptr.span(false));
        table.indices = indices.at(on_gpu);
        table.indptr = indptr.at(on_gpu);
        gather_kv(context, ds_mla(rows, on_gpu), table, kv_len.span(on_gpu), k_out.view(on_gpu), v_out.view(on_gpu));
        convert_pages(context, ds_mla(rows, on_gpu), strided.view(on_gpu), source.span(on_gpu),
                      destination.span(on_gpu));
      }
      ASSERT_TRUE(other.equal()) << to_string(dtype);
      ASSERT_TRUE(k_out.memory.equal()) << to_string(dtype);
      ASSERT_TRUE(v_out.memory.equal()) << to_string(dtype);
      ASSERT_TRUE(strided.memory.equal()) << to_string(dtype);
      for (const bool on_gpu : {false, true}) {
        KvCacheView cache = strided.view(on_gpu);
        cache.v = cache.k;
        cache.v_strides = cache.k_strides;
        convert_pages(context_of(on_gpu), cache, ds_mla(rows, on_gpu), destination.span(on_gpu), source.span(on_gpu));
      }
      ASSERT_TRUE(rows.equal()) << to_string(dtype);
    }
  }
}

/// What a CPU refuses a GPU leaves out and reports, and nothing lands anywhere else.
TEST_F(CudaTest, MovesOutOfRangeAreLeftOutAndReported) {
  std::mt19937 random(3);
  const KvCacheShape shape{4, 16, 1, 16, 16, DType::kFloat32};
  Pool pool(Layout::kNhd, shape, random), other(Layout::kNhd, shape, random);
  const std::vector<std::byte> before = pool.memory.host;
  const std::vector<std::byte> other_before = other.memory.host;
  Rows k(DType::kFloat32, 3, 1, 16, 0, random), v(DType::kFloat32, 3, 1, 16, 0, random);
  const Context context = Context::cuda(0);
  Twin<int32_t> status(std::vector<int32_t>{0});

  Twin<int64_t> slots(std::vector<int64_t>{64, -1, INT64_MAX});
  CacheWriteArgs args;
  args.k = k.view(true);
  args.v = v.view(true);
  args.slot_mapping = slots.at(true);
  args.num_slots = 3;
  args.cache = pool.view(true);
  args.status = status.at(true);
  write_kv_cache(context, args);
  EXPECT_EQ(pool.memory.gpu(), before);
  EXPECT_EQ(status.gpu(), std::vector<int32_t>{1});
  args.num_slots = 0;
  write_kv_cache(context, args);

  Twin<int32_t> quiet(std::vector<int32_t>{0});
  const std::vector<std::byte> k_before = k.memory.host;
  Twin<int32_t> lengths(std::vector<int32_t>{3}), indptr(std::vector<int32_t>{0, 1});
  const auto gather = [&](int32_t page, int32_t length, int32_t* reported) {
    Twin<int32_t> indices(std::vector<int32_t>{page}), kv_len(std::vector<int32_t>{length});
    PageTableView table;
    table.indices = indices.at(true);
    table.num_indices = 1;
    table.indptr = indptr.at(true);
    table.num_rows = 1;
    gather_kv(context, pool.view(true), table, kv_len.span(true), k.view(true), v.view(true), {}, {}, {}, reported);
    wait_for_gpu();
  };
  for (const int32_t page : {-1, 4, INT32_MAX}) {
    Twin<int32_t> reported(std::vector<int32_t>{0});
    gather(page, 3, reported.at(true));
    EXPECT_EQ(reported.gpu(), std::vector<int32_t>{1}) << page;
    EXPECT_EQ(k.memory.gpu(), k_before) << page;
  }
  Twin<int32_t> longer(std::vector<int32_t>{0});
  gather(2, 5, longer.at(true));
  EXPECT_EQ(longer.gpu(), std::vector<int32_t>{1});
  gather(2, 3, quiet.at(true));
  EXPECT_EQ(quiet.gpu(), std::vector<int32_t>{0});

  for (const auto& [from, to] : {std::pair<int32_t, int32_t>{4, 0}, {-1, 0}, {0, 4}, {0, -5}}) {
    Twin<int32_t> source(std::vector<int32_t>{from}), destination(std::vector<int32_t>{to});
    Twin<int32_t> reported(std::vector<int32_t>{0});
    copy_pages(context, pool.view(true), other.view(true), source.span(true), destination.span(true), {},
               reported.at(true));
    EXPECT_EQ(reported.gpu(), std::vector<int32_t>{1});
    EXPECT_EQ(other.memory.gpu(), other_before);
  }
}

TEST_F(CudaTest, StatusIsForGpus) {
  int32_t status = 0;
  CacheWriteArgs args;
  args.k = args.v = ConstTensorView(nullptr, DType::kFloat32, {0, 1, 8});
  args.cache = make_nhd_view({0, 16, 1, 8, 8, DType::kFloat32}, nullptr, nullptr);
  args.status = &status;
  EXPECT_THROW(write_kv_cache(Context::cpu(), args), Error);
}

/// More requests than a CTA has threads, of lengths that leave many blocks beginning inside a row.
TEST_F(CudaTest, GathersManyRows) {
  std::mt19937 random(5);
  for (const int32_t rows : {1, 300, 1500}) {
    std::vector<int32_t> lengths(static_cast<size_t>(rows));
    for (int32_t& length : lengths) length = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 70);
    if (rows == 1) lengths[0] = 5000;
    std::vector<int32_t> starts(lengths.size() + 1), last(lengths.size());
    paged_indptr(lengths, 16, starts, last);
    std::vector<int32_t> pages(static_cast<size_t>(starts.back()));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    const auto tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    Pool pool(Layout::kNhd, {starts.back(), 16, 1, 16, 16, DType::kBFloat16}, random);
    Rows k(DType::kBFloat16, tokens, 1, 16, 0, random), v(DType::kBFloat16, tokens, 1, 16, 0, random);
    Twin<int32_t> kv_len(lengths), indptr(starts), indices(pages), status(std::vector<int32_t>{0});
    for (const bool on_gpu : {false, true}) {
      PageTableView table = csr_table(indices.span(false), indptr.span(false));
      table.indices = indices.at(on_gpu);
      table.indptr = indptr.at(on_gpu);
      gather_kv(context_of(on_gpu), pool.view(on_gpu), table, kv_len.span(on_gpu), k.view(on_gpu), v.view(on_gpu), {},
                {}, {}, on_gpu ? status.at(true) : nullptr);
    }
    EXPECT_TRUE(k.memory.equal());
    EXPECT_TRUE(v.memory.equal());
    EXPECT_EQ(status.gpu(), std::vector<int32_t>{0});
  }
}

/// Offsets beyond 2^31 elements, in a cache of one-byte elements: what is written to its last pages is gathered from
/// there.
TEST_F(CudaTest, PoolsBeyondTwoToThe31) {
  constexpr int32_t kHeads = 8, kDim = 128, kPageSize = 16, kTokens = 64;
  constexpr int64_t kPageElements = int64_t{kPageSize} * kHeads * kDim;
  const int64_t num_pages = (int64_t{1} << 31) / kPageElements + 16;
  size_t free_bytes = 0, all_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &all_bytes));
  const auto half = static_cast<size_t>(num_pages * kPageElements);
  if (free_bytes < 2 * half + (size_t{256} << 20)) GTEST_SKIP() << "not enough memory";
  std::mt19937 random(9);
  const DeviceArray<std::byte> k_cache(half), v_cache(half);
  Rows k(DType::kFloat8E4M3, kTokens, kHeads, kDim, 0, random), v(DType::kFloat8E4M3, kTokens, kHeads, kDim, 0, random);
  Rows k_out(DType::kFloat8E4M3, kTokens, kHeads, kDim, 0, random);
  Rows v_out(DType::kFloat8E4M3, kTokens, kHeads, kDim, 0, random);
  Twin<int32_t> kv_len(std::vector<int32_t>{kTokens}), indptr(std::vector<int32_t>{0, 4});
  std::vector<int32_t> pages;
  for (int32_t i = 0; i < 4; ++i) pages.push_back(static_cast<int32_t>(num_pages) - 1 - 4 * i);
  Twin<int32_t> indices(pages);
  std::vector<int64_t> slot_of;
  for (int32_t t = 0; t < kTokens; ++t) {
    slot_of.push_back(int64_t{pages[static_cast<size_t>(t / kPageSize)]} * kPageSize + t % kPageSize);
  }
  Twin<int64_t> slots(slot_of);
  const Context context = Context::cuda(0);
  CacheWriteArgs args;
  args.k = k.view(true);
  args.v = v.view(true);
  args.slot_mapping = slots.at(true);
  args.num_slots = kTokens;
  args.cache =
      make_nhd_view({num_pages, kPageSize, kHeads, kDim, kDim, DType::kFloat8E4M3}, k_cache.data(), v_cache.data());
  write_kv_cache(context, args);
  PageTableView table;
  table.indices = indices.at(true);
  table.num_indices = 4;
  table.indptr = indptr.at(true);
  table.num_rows = 1;
  gather_kv(context, args.cache, table, kv_len.span(true), k_out.view(true), v_out.view(true));
  EXPECT_EQ(k_out.memory.gpu(), k.memory.host);
  EXPECT_EQ(v_out.memory.gpu(), v.memory.host);
  std::vector<std::byte> last(static_cast<size_t>(kHeads * kDim));
  check(cudaMemcpy(last.data(), k_cache.data() + slot_of[0] * kHeads * kDim, last.size(), cudaMemcpyDeviceToHost));
  EXPECT_TRUE(std::equal(last.begin(), last.end(), k.memory.host.begin()));
}

}  // namespace
}  // namespace folio::cuda_test
