// Caches: copies, conversions and gathers have the C++ functions' bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "c_handles.hpp"
#include "folio/c/folio.h"
#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"

namespace folio_c_test {
namespace {

constexpr int32_t kPages = 4, kPageSize = 8, kHeads = 2, kDim = 16;
constexpr size_t kElements = size_t{kPages} * kPageSize * kHeads * kDim;
constexpr folio_kv_cache_shape kShape = {kPages, kPageSize, kHeads, kDim, kDim, FOLIO_DTYPE_FLOAT32};

folio::KvCacheShape cpp_shape(folio::DType dtype) {
  return {kPages, kPageSize, kHeads, kDim, kDim, dtype};
}

/// A float32 cache of random values and its views.
struct FloatCache {
  std::vector<float> k = random_floats(kElements, 1), v = random_floats(kElements, 2);
  folio_kv_cache cache{};
  folio::KvCacheView cpp = folio::make_nhd_view(cpp_shape(folio::DType::kFloat32), k.data(), v.data());
  FloatCache() {
    EXPECT_EQ(folio_make_nhd_cache(&kShape, k.data(), v.data(), nullptr, nullptr, &cache), FOLIO_OK)
        << folio_last_error();
  }
};

/// An int8 cache with its token scales.
struct Int8Cache {
  std::vector<int8_t> k = std::vector<int8_t>(kElements), v = k;
  std::vector<float> k_scales = std::vector<float>(size_t{kPages} * kPageSize * kHeads), v_scales = k_scales;
  folio_kv_cache cache{};
  folio::KvCacheView cpp =
      folio::make_nhd_view(cpp_shape(folio::DType::kInt8), k.data(), v.data(), k_scales.data(), v_scales.data());
  Int8Cache() {
    folio_kv_cache_shape shape = kShape;
    shape.dtype = FOLIO_DTYPE_INT8;
    EXPECT_EQ(folio_make_nhd_cache(&shape, k.data(), v.data(), k_scales.data(), v_scales.data(), &cache), FOLIO_OK)
        << folio_last_error();
  }
};

TEST(CCache, ViewsAreTheCppOnes) {
  FloatCache f;
  EXPECT_EQ(std::memcmp(&f.cache, &f.cpp, sizeof(f.cpp)), 0);
  Int8Cache i;
  EXPECT_EQ(std::memcmp(&i.cache, &i.cpp, sizeof(i.cpp)), 0);
  EXPECT_EQ(folio_validate_kv_cache(&i.cache), FOLIO_OK) << folio_last_error();
  int64_t elements = 0;
  ASSERT_EQ(folio_token_scale_elements(&kShape, &elements), FOLIO_OK);
  EXPECT_EQ(elements, kPages * kPageSize * kHeads);
  i.cache.k_token_scales.data = nullptr;
  EXPECT_EQ(folio_validate_kv_cache(&i.cache), FOLIO_INVALID_ARGUMENT);
  folio_kv_cache refused{};
  expect_refusal(folio_make_hnd_cache(&kShape, f.k.data(), f.v.data(), i.k_scales.data(), nullptr, &refused),
                 FOLIO_INVALID_ARGUMENT, "token scales are given for a cache of float32");
  EXPECT_EQ(refused.view.k, nullptr);
}

TEST(CCache, PagesAreCopiedWithTheirTokenScales) {
  const auto context = make_context();
  FloatCache f;
  Int8Cache c, cpp;
  const std::vector<int32_t> all = {0, 1, 2, 3};
  // Converted to int8, which makes the scales; then pages 0 and 1 copied to 3 and 2.
  ASSERT_EQ(
      folio_convert_pages(context.get(), &f.cache, &c.cache, all.data(), all.data(), 4, nullptr, nullptr, nullptr),
      FOLIO_OK)
      << folio_last_error();
  folio::convert_pages(folio::Context::cpu(), f.cpp, cpp.cpp, all, all);
  expect_same(c.k, cpp.k);
  expect_same(c.k_scales, cpp.k_scales);
  const std::vector<int32_t> from = {0, 1}, to = {3, 2};
  ASSERT_EQ(folio_copy_pages(context.get(), &c.cache, &c.cache, from.data(), to.data(), 2, nullptr, nullptr), FOLIO_OK)
      << folio_last_error();
  folio::copy_pages(folio::Context::cpu(), cpp.cpp, cpp.cpp, from, to);
  expect_same(c.v, cpp.v);
  expect_same(c.v_scales, cpp.v_scales);
  EXPECT_EQ(c.k_scales[0], c.k_scales[3 * kPageSize * kHeads]);
}

TEST(CCache, ConversionsHaveScalesAndGathersTakeThemBack) {
  const auto context = make_context();
  FloatCache f;
  std::vector<uint8_t> k(kElements), v(kElements), cpp_k(kElements), cpp_v(kElements);
  folio_kv_cache_shape shape = kShape;
  shape.dtype = FOLIO_DTYPE_FLOAT8_E4M3;
  folio_kv_cache fp8{};
  ASSERT_EQ(folio_make_hnd_cache(&shape, k.data(), v.data(), nullptr, nullptr, &fp8), FOLIO_OK) << folio_last_error();
  const folio::KvCacheView cpp = folio::make_hnd_view(cpp_shape(folio::DType::kFloat8E4M3), cpp_k.data(), cpp_v.data());
  folio_scale scale = FOLIO_SCALE_INIT;
  scale.value = 0.125f;
  const folio_cache_convert_scales scales = {nullptr, nullptr, &scale, nullptr};
  const std::vector<int32_t> from = {0, 1, 2}, to = {2, 3, 1};
  ASSERT_EQ(folio_convert_pages(context.get(), &f.cache, &fp8, from.data(), to.data(), 3, &scales, nullptr, nullptr),
            FOLIO_OK)
      << folio_last_error();
  folio::CacheConvertScales cpp_scales;
  cpp_scales.to_k.value = 0.125f;
  folio::convert_pages(folio::Context::cpu(), f.cpp, cpp, from, to, cpp_scales);
  expect_same(k, cpp_k);
  expect_same(v, cpp_v);

  const std::vector<int32_t> pages = {2, 3, 1}, indptr = {0, 2, 3}, lens = {11, 8};
  const folio_page_table_view table = {FOLIO_TABLE_CSR, pages.data(), 3, indptr.data(), 0, 0, 2};
  const size_t out_elements = 19 * kHeads * kDim;
  std::vector<float> k_out(out_elements), v_out(out_elements), cpp_k_out(out_elements), cpp_v_out(out_elements);
  const folio_tensor_view k_view = packed(k_out.data(), FOLIO_DTYPE_FLOAT32, {19, kHeads, kDim});
  const folio_tensor_view v_view = packed(v_out.data(), FOLIO_DTYPE_FLOAT32, {19, kHeads, kDim});
  ASSERT_EQ(
      folio_gather_kv(context.get(), &fp8, &table, lens.data(), 2, &k_view, &v_view, &scale, nullptr, nullptr, nullptr),
      FOLIO_OK)
      << folio_last_error();
  folio::gather_kv(folio::Context::cpu(), cpp, folio::csr_table(pages, indptr), lens,
                   {cpp_k_out.data(), folio::DType::kFloat32, {19, kHeads, kDim}},
                   {cpp_v_out.data(), folio::DType::kFloat32, {19, kHeads, kDim}}, cpp_scales.to_k);
  expect_same(k_out, cpp_k_out);
  expect_same(v_out, cpp_v_out);

  // The used pages as 16-bit ones.
  const std::vector<int32_t> dense = {2, 3, 1, 0};
  const folio_page_table_view dense_table = {FOLIO_TABLE_DENSE, dense.data(), 4, nullptr, 2, 0, 2};
  int64_t needed = 0;
  ASSERT_EQ(folio_num_dequantized_pages(lens.data(), 2, kPageSize, &needed), FOLIO_OK);
  EXPECT_EQ(needed, 4);
  std::vector<uint16_t> wide_k(kElements), wide_v(kElements), cpp_wide_k(kElements), cpp_wide_v(kElements);
  shape.dtype = FOLIO_DTYPE_BFLOAT16;
  folio_kv_cache wide{};
  ASSERT_EQ(folio_make_nhd_cache(&shape, wide_k.data(), wide_v.data(), nullptr, nullptr, &wide), FOLIO_OK);
  std::vector<int32_t> new_table(4, -1), cpp_table(4, -1);
  ASSERT_EQ(folio_dequantize_pages(context.get(), &fp8, &dense_table, 2, lens.data(), 2, 0.125f, 1.0f, &wide,
                                   new_table.data(), nullptr, nullptr),
            FOLIO_OK)
      << folio_last_error();
  folio::dequantize_pages(
      folio::Context::cpu(), cpp, folio::dense_table(dense, 2, 2), 2, lens, 0.125f, 1.0f,
      folio::make_nhd_view(cpp_shape(folio::DType::kBFloat16), cpp_wide_k.data(), cpp_wide_v.data()), cpp_table);
  EXPECT_EQ(new_table, cpp_table);
  expect_same(wide_k, cpp_wide_k);
  expect_same(wide_v, cpp_wide_v);
}

TEST(CCache, KeysOfMla) {
  const auto context = make_context();
  const std::vector<float> nope = random_floats(3 * 2 * 4, 1), pe = random_floats(3 * 2, 2);
  std::vector<float> k(3 * 2 * 6), expected(k);
  const folio_tensor_view k_view = packed(k.data(), FOLIO_DTYPE_FLOAT32, {3, 2, 6});
  const folio_const_tensor_view nope_view = const_packed(nope.data(), FOLIO_DTYPE_FLOAT32, {3, 2, 4});
  const folio_const_tensor_view pe_view = const_packed(pe.data(), FOLIO_DTYPE_FLOAT32, {3, 1, 2});
  ASSERT_EQ(folio_concat_mla_k(context.get(), &k_view, &nope_view, &pe_view, nullptr), FOLIO_OK) << folio_last_error();
  folio::concat_mla_k({expected.data(), folio::DType::kFloat32, {3, 2, 6}},
                      {nope.data(), folio::DType::kFloat32, {3, 2, 4}}, {pe.data(), folio::DType::kFloat32, {3, 1, 2}});
  expect_same(k, expected);
}

TEST(CCache, BadArguments) {
  const auto owned = make_context();
  const folio_context* c = owned.get();
  FloatCache f;
  const std::vector<float> before = f.k;
  const std::vector<int32_t> pages = {0, 1}, beyond = {0, kPages};
  const folio_page_table_view table = {FOLIO_TABLE_CSR, pages.data(), 2, pages.data(), 0, 0, 1};
  const folio_tensor_view out = packed(f.v.data(), FOLIO_DTYPE_FLOAT32, {1, kHeads, kDim});
  int64_t count = -1;
  expect_null_refused(folio_validate_kv_cache(nullptr), "cache");
  expect_null_refused(folio_token_scale_elements(nullptr, &count), "shape");
  expect_null_refused(folio_token_scale_elements(&kShape, nullptr), "elements");
  expect_null_refused(folio_copy_pages(nullptr, &f.cache, &f.cache, nullptr, nullptr, 0, nullptr, nullptr), "context");
  expect_null_refused(folio_copy_pages(c, nullptr, &f.cache, nullptr, nullptr, 0, nullptr, nullptr), "from");
  expect_null_refused(folio_copy_pages(c, &f.cache, nullptr, nullptr, nullptr, 0, nullptr, nullptr), "to");
  expect_null_refused(folio_copy_pages(c, &f.cache, &f.cache, nullptr, pages.data(), 2, nullptr, nullptr), "source");
  expect_null_refused(folio_copy_pages(c, &f.cache, &f.cache, pages.data(), nullptr, 2, nullptr, nullptr),
                      "destination");
  expect_refusal(folio_copy_pages(c, &f.cache, &f.cache, pages.data(), pages.data(), -2, nullptr, nullptr),
                 FOLIO_INVALID_ARGUMENT, "has -2 elements");
  EXPECT_EQ(folio_copy_pages(c, &f.cache, &f.cache, pages.data(), beyond.data(), 2, nullptr, nullptr),
            FOLIO_INVALID_ARGUMENT);
  expect_null_refused(folio_convert_pages(c, &f.cache, nullptr, nullptr, nullptr, 0, nullptr, nullptr, nullptr), "to");
  expect_null_refused(folio_gather_kv(c, &f.cache, nullptr, nullptr, 0, &out, &out, nullptr, nullptr, nullptr, nullptr),
                      "table");
  expect_null_refused(folio_gather_kv(c, &f.cache, &table, nullptr, 1, &out, &out, nullptr, nullptr, nullptr, nullptr),
                      "kv_len");
  expect_null_refused(
      folio_gather_kv(c, &f.cache, &table, pages.data(), 1, nullptr, &out, nullptr, nullptr, nullptr, nullptr),
      "k_out");
  expect_null_refused(folio_num_dequantized_pages(pages.data(), 2, 8, nullptr), "pages");
  expect_refusal(
      folio_dequantize_pages(c, &f.cache, &table, -1, pages.data(), 2, 1, 1, &f.cache, nullptr, nullptr, nullptr),
      FOLIO_INVALID_ARGUMENT, "columns is -1");
  const folio_const_tensor_view in = const_packed(f.k.data(), FOLIO_DTYPE_FLOAT32, {1, kHeads, kDim});
  expect_null_refused(folio_concat_mla_k(c, nullptr, &in, &in, nullptr), "k");
  expect_null_refused(folio_concat_mla_k(c, &out, nullptr, &in, nullptr), "k_nope");
  expect_null_refused(folio_concat_mla_k(c, &out, &in, nullptr, nullptr), "k_pe");
  f.cache.view.format = 3;
  expect_refusal(folio_validate_kv_cache(&f.cache), FOLIO_INVALID_ARGUMENT, "cache.format is 3");
  expect_refusal(folio_copy_pages(c, &f.cache, &f.cache, nullptr, nullptr, 0, nullptr, nullptr), FOLIO_INVALID_ARGUMENT,
                 ".format is 3");
  expect_same(f.k, before);
}

}  // namespace
}  // namespace folio_c_test
