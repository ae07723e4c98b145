// int8 caches with a scale a token and KV head: written, copied, gathered, converted.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "attention/int8_cache_test_util.hpp"
#include "core/expect_refused_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

using folio::testing::expect_refused;

/// Expects that a slot holds what the token becomes.
void expect_token(const Int8Pool& pool, bool is_k, int64_t slot, const Rows& rows, int64_t token, int64_t dim) {
  for (int64_t head = 0; head < rows.heads; ++head) {
    const auto element = [&](int64_t d) {
      return load_as_float(rows.memory.data(), rows.dtype, rows.index(token, head, d));
    };
    float most = 0.0f;
    for (int64_t d = 0; d < rows.dim; ++d) most = std::max(most, std::abs(element(d)));
    const float scale = most / 127.0f;
    ASSERT_EQ(pool.scale(is_k, slot, head), scale) << "head " << head;
    for (int64_t d = 0; d < dim; ++d) {
      ASSERT_EQ(pool.stored(is_k, slot, head, d), std::nearbyint(element(d) / scale)) << head << ", " << d;
    }
  }
}

TEST(Int8Cache, WritesTokensWithTheirScales) {
  const std::vector<int64_t> slots{35, -1, 0, 16, 17, 46};  // 16 and 17 are a pair of the packed format
  for (const Int8Layout layout : kInt8Layouts) {
    SCOPED_TRACE(static_cast<int>(layout));
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      Int8Pool pool(layout, 3, 16, 2, 300, 264);  // more than one chunk of the conversions
      Rows k(dtype, 6, 2, 300, 5, 1), v(dtype, 6, 2, 264, 0, 2);
      write_kv_cache(Context::cpu(), write_args(k, v, slots, pool));
      for (const size_t token : {0u, 2u, 3u, 4u, 5u}) {
        const bool alias = layout == Int8Layout::kAlias;
        expect_token(pool, true, slots[token], k, static_cast<int64_t>(token), 300);
        expect_token(pool, false, slots[token], alias ? k : v, static_cast<int64_t>(token), 264);
      }
      EXPECT_TRUE(layout == Int8Layout::kInline || std::isnan(pool.scale(true, 1, 0)));  // not written
      EXPECT_EQ(pool.stored(true, 1, 0, 0), 7.0f);
    }
  }
}

/// Ties go to the even number; infinities become the largest number, NaN becomes 0, and their neighbours keep theirs.
TEST(Int8Cache, WritesUnusualTokens) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();
  Int8Pool pool(Int8Layout::kNhd, 1, 4, 2, 8, 8);
  const std::array<float, 8> unusual{127.0f, 0.5f, 1.5f, -2.5f, kInf, -kInf, kNotANumber, -126.6f};
  const std::array<float, 8> no_number{kNotANumber, kInf, -kInf, 0.0f, -0.0f, kNotANumber, kNotANumber, kInf};
  const std::array<float, 8> tiny{1e-44f, -1e-44f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  const std::array<float, 8> large{3e38f, -3e38f, 1.5e38f, 0.0f, 0.0f, 0.0f, 0.0f, kInf};
  Rows k(DType::kFloat32, 4, 2, 8, 0, 1), v(DType::kFloat32, 4, 2, 8, 0, 2);
  auto* const values = reinterpret_cast<float*>(k.memory.data());
  std::fill_n(values, 4 * 2 * 8, 0.0f);
  for (const auto& [row, given] : {std::pair{0, &unusual}, {1, &no_number}, {2, &tiny}, {3, &large}}) {
    std::copy(given->begin(), given->end(), values + row * 8);
  }
  write_kv_cache(Context::cpu(), write_args(k, v, {0, 1, 2, 3}, pool));
  const auto row = [&](int64_t token, int64_t head) {
    std::array<int, 8> numbers{};
    for (int64_t d = 0; d < 8; ++d)
      numbers[static_cast<size_t>(d)] = static_cast<int>(pool.stored(true, token, head, d));
    return numbers;
  };
  EXPECT_EQ(pool.scale(true, 0, 0), 1.0f);
  EXPECT_EQ(row(0, 0), (std::array<int, 8>{127, 0, 2, -2, 127, -127, 0, -127}));
  for (const auto& [token, head] : {std::pair{0, 1}, {1, 0}, {2, 0}}) {  // nothing but 0, or too small for a scale
    EXPECT_EQ(pool.scale(true, token, head), 0.0f);
    EXPECT_EQ(row(token, head), (std::array<int, 8>{}));
  }
  EXPECT_EQ(pool.scale(true, 1, 1), 3e38f / 127.0f);
  EXPECT_EQ(row(1, 1), (std::array<int, 8>{127, -127, 64, 0, 0, 0, 0, 127}));
}

/// What comes back differs by half a step at most.
TEST(Int8Cache, GathersWhatWasWritten) {
  constexpr int32_t kTokens = 40;
  const std::vector<int32_t> indices{2, 0, 3}, indptr{0, 2, 3}, kv_len{30, 10};
  std::vector<int64_t> slots;
  for (int32_t token = 0; token < kTokens; ++token) {
    const int32_t page = token < 16 ? 2 : token < 30 ? 0 : 3;
    slots.push_back(page * 16 + (token < 30 ? token % 16 : token - 30));
  }
  for (const Int8Layout layout : {Int8Layout::kNhd, Int8Layout::kHnd, Int8Layout::kPacked}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      Int8Pool pool(layout, 4, 16, 3, 24, 40);
      Rows k(DType::kFloat32, kTokens, 3, 24, 0, 5), v(DType::kFloat32, kTokens, 3, 40, 3, 6);
      write_kv_cache(Context::cpu(), write_args(k, v, slots, pool));
      Rows k_out(dtype, kTokens, 3, 24, 7, 6), v_out(dtype, kTokens, 3, 40, 0, 7);
      gather_kv(Context::cpu(), pool.view, csr_table(indices, indptr), kv_len, k_out.view(), v_out.view());
      for (const bool is_k : {true, false}) {
        const Rows& given = is_k ? k : v;
        const Rows& got = is_k ? k_out : v_out;
        for (int64_t token = 0; token < kTokens; ++token) {
          const int64_t slot = slots[static_cast<size_t>(token)];
          for (int64_t i = 0; i < 3 * given.dim; ++i) {
            const int64_t head = i / given.dim;
            const int64_t d = i % given.dim;
            const float scale = pool.scale(is_k, slot, head);
            std::array<std::byte, 4> exact{};
            store_from_float(exact.data(), dtype, 0, pool.stored(is_k, slot, head, d) * scale);
            const float read = load_as_float(got.memory.data(), dtype, got.index(token, head, d));
            ASSERT_EQ(read, load_as_float(exact.data(), dtype, 0));
            const float written = load_as_float(given.memory.data(), DType::kFloat32, given.index(token, head, d));
            ASSERT_NEAR(read, written, 0.5001f * scale + std::abs(written) * 0x1p-8f);
          }
        }
      }
    }
  }
}

std::vector<int64_t> all_slots(const KvCacheShape& shape) {
  std::vector<int64_t> slots(static_cast<size_t>(shape.num_pages * shape.page_size));
  std::iota(slots.begin(), slots.end(), int64_t{0});
  return slots;
}

void fill_pool(Int8Pool& pool, uint32_t seed) {
  const KvCacheShape& s = pool.shape;
  Rows k(DType::kFloat32, s.num_pages * s.page_size, s.num_kv_heads, s.head_dim_qk, 0, seed);
  Rows v(DType::kFloat32, s.num_pages * s.page_size, s.num_kv_heads, s.head_dim_v, 0, seed + 1);
  write_kv_cache(Context::cpu(), write_args(k, v, all_slots(s), pool));
}

/// Expects the same stored numbers and scales in pages of equal sizes.
void expect_same_page(const Int8Pool& got, int64_t got_page, const Int8Pool& expected, int64_t page) {
  const KvCacheShape& s = expected.shape;
  for (const bool is_k : {true, false}) {
    for (int64_t i = 0; i < int64_t{s.page_size} * s.num_kv_heads; ++i) {
      const int64_t token = i / s.num_kv_heads;
      const int64_t head = i % s.num_kv_heads;
      ASSERT_EQ(got.scale(is_k, got_page * s.page_size + token, head),
                expected.scale(is_k, page * s.page_size + token, head));
      for (int64_t d = 0; d < (is_k ? s.head_dim_qk : s.head_dim_v); ++d) {
        ASSERT_EQ(got.stored(is_k, got_page * s.page_size + token, head, d),
                  expected.stored(is_k, page * s.page_size + token, head, d));
      }
    }
  }
}

TEST(Int8Cache, CopiesPagesWithTheirScales) {
  const std::vector<int32_t> source{2, 0}, destination{1, 3};
  for (const Int8Layout layout : kInt8Layouts) {
    SCOPED_TRACE(static_cast<int>(layout));
    Int8Pool from(layout, 3, 16, 2, 24, 24), to(layout, 4, 16, 2, 24, 24);
    fill_pool(from, 3);
    copy_pages(Context::cpu(), from.view, to.view, source, destination);
    expect_same_page(to, 1, from, 2);
    expect_same_page(to, 3, from, 0);
    EXPECT_EQ(to.stored(true, 0, 0, 0), 7.0f);
  }
}

/// Between formats of int8 every number is kept.
TEST(Int8Cache, ConvertsBetweenFormats) {
  const std::vector<int32_t> source{1, 0}, destination{0, 2};
  for (const Int8Layout layout : {Int8Layout::kHnd, Int8Layout::kPacked}) {
    Int8Pool from(Int8Layout::kNhd, 2, 16, 2, 24, 40), to(layout, 3, 16, 2, 24, 40),
        back(Int8Layout::kNhd, 2, 16, 2, 24, 40);
    fill_pool(from, 4);
    convert_pages(Context::cpu(), from.view, to.view, source, destination);
    expect_same_page(to, 0, from, 1);
    expect_same_page(to, 2, from, 0);
    convert_pages(Context::cpu(), to.view, back.view, destination, source);
    expect_same_page(back, 0, from, 0);
    expect_same_page(back, 1, from, 1);
  }
}

/// From a cache of floats as write_kv_cache does it, and back as gather_kv does it.
TEST(Int8Cache, ConvertsPagesOfFloats) {
  const std::vector<int32_t> pages{0, 1, 2};
  for (const DType dtype : kCacheDTypes) {
    for (const Layout layout : {Layout::kNhd, Layout::kPacked}) {
      const KvCacheShape shape{3, 16, 2, 24, 40, dtype};
      if (!exists(layout, shape)) continue;
      SCOPED_TRACE(std::string(to_string(dtype)));
      Pool floats = pool_of_numbers(layout, shape, 11);
      CacheConvertScales scales;
      if (is_fp8(dtype)) scales.from_k.value = 0.25f, scales.from_v.value = 3.0f;
      Int8Pool pool(Int8Layout::kHnd, 3, 16, 2, 24, 40);
      convert_pages(Context::cpu(), floats.view(), pool.view, pages, pages, scales);
      Pool back(layout, shape, 12);
      CacheConvertScales to_scales;
      if (is_fp8(dtype)) to_scales.to_k.value = 0.25f, to_scales.to_v.value = 3.0f;
      convert_pages(Context::cpu(), pool.view, back.view(), pages, pages, to_scales);
      const KvCacheView given = floats.view();
      const KvCacheView again = back.view();
      for (const bool is_k : {true, false}) {
        const int64_t dim = is_k ? 24 : 40;
        const float fp8_scale = !is_fp8(dtype) ? 1.0f : is_k ? 0.25f : 3.0f;
        for (int64_t slot = 0; slot < 48; ++slot) {
          for (int64_t head = 0; head < 2; ++head) {
            const auto index = [&](int64_t d) {
              return is_k ? k_index(given, slot / 16, slot % 16, head, d)
                          : v_index(given, slot / 16, slot % 16, head, d);
            };
            float most = 0.0f;
            for (int64_t d = 0; d < dim; ++d) {
              most = std::max(most, std::abs(load_as_float(is_k ? given.k : given.v, dtype, index(d)) * fp8_scale));
            }
            const float scale = most / 127.0f;
            ASSERT_EQ(pool.scale(is_k, slot, head), scale);
            for (int64_t d = 0; d < dim; ++d) {
              const float value = load_as_float(is_k ? given.k : given.v, dtype, index(d)) * fp8_scale;
              ASSERT_EQ(pool.stored(is_k, slot, head, d), std::nearbyint(value / scale));
              std::array<std::byte, 4> exact{};
              store_from_float(exact.data(), dtype, 0, pool.stored(is_k, slot, head, d) * scale / fp8_scale);
              ASSERT_EQ(load_as_float(is_k ? again.k : again.v, dtype, index(d)),
                        load_as_float(exact.data(), dtype, 0));
            }
          }
        }
      }
    }
  }
}

TEST(Int8Cache, NeedsScalesThatLieApart) {
  Int8Pool pool(Int8Layout::kNhd, 2, 16, 2, 64, 64);
  const auto refused = [&](const std::string& text, const auto& change) {
    KvCacheView cache = pool.view;
    change(cache);
    expect_refused(text, [&] { validate(cache); });
  };
  EXPECT_NO_THROW(validate(pool.view));
  refused("k_token_scales.data is null", [](KvCacheView& c) { c.k_token_scales.data = nullptr; });
  refused("v_token_scales.data is null", [](KvCacheView& c) { c.v_token_scales.data = nullptr; });
  refused("v_token_scales.data is not aligned", [](KvCacheView& c) {
    c.v_token_scales.data = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(c.v_token_scales.data) + 2);
  });
  refused("k_token_scales's token stride is -2", [](KvCacheView& c) { c.k_token_scales.strides.token = -2; });
  refused("make tokens overlap", [](KvCacheView& c) { c.k_token_scales.strides.head = 0; });
  refused("k_token_scales and v_token_scales overlap", [](KvCacheView& c) { c.v_token_scales = c.k_token_scales; });
  refused("v_token_scales overlap k or v", [](KvCacheView& c) { c.v_token_scales.data = static_cast<float*>(c.v); });
  refused("v_token_scales differ from k_token_scales", [](KvCacheView& c) {
    c.v = c.k;
    c.v_strides = c.k_strides;
  });
  refused("k_token_scales are given, but the cache is fp8_e4m3", [](KvCacheView& c) { c.dtype = DType::kFloat8E4M3; });
  KvCacheShape shape = pool.shape;
  expect_refused("k_token_scales.data is null", [&] { make_nhd_view(shape, pool.view.k, pool.view.v); });
  shape.dtype = DType::kBFloat16;
  expect_refused("the cache's dtype is bfloat16; int8 caches have them",
                 [&] { make_hnd_view(shape, pool.view.k, pool.view.v, pool.scales.data(), pool.scales.data()); });
}

TEST(Int8Cache, RefusesWhatItCannotTake) {
  Int8Pool pool(Int8Layout::kNhd, 2, 16, 2, 64, 64);
  Rows k(DType::kBFloat16, 1, 2, 64, 0, 12), v(DType::kBFloat16, 1, 2, 64, 0, 13);
  const std::vector<int64_t> slots{0};
  const CacheWriteArgs good = write_args(k, v, slots, pool);
  const auto refused = [&](const std::string& text, const auto& change) {
    CacheWriteArgs args = good;
    change(args);
    expect_refused(text, [&] { write_kv_cache(Context::cpu(), args); });
  };
  refused("int8 caches have a scale for each token", [](CacheWriteArgs& args) { args.k_scale.value = 0.5f; });
  refused("k is fp8_e4m3, the cache int8", [](CacheWriteArgs& args) { args.k.dtype = DType::kFloat8E4M3; });
  refused("k is int8", [](CacheWriteArgs& args) { args.k.dtype = DType::kInt8; });
  refused("v overlaps the cache's token scales", [&](CacheWriteArgs& args) { args.v.data = pool.scales.data(); });
  EXPECT_TRUE(std::isnan(pool.scale(true, 0, 0)));  // nothing was written

  Rows out(DType::kFloat32, 1, 2, 64, 0, 14), v_out(DType::kFloat32, 1, 2, 64, 0, 15);
  const std::vector<int32_t> indices{0}, indptr{0, 1}, kv_len{1}, page{0};
  TensorView int8_out = out.view();
  int8_out.dtype = DType::kInt8;
  expect_refused("k_out is int8", [&] {
    gather_kv(Context::cpu(), pool.view, csr_table(indices, indptr), kv_len, int8_out, v_out.view());
  });
  Scale half;
  half.value = 0.5f;
  expect_refused("int8 caches have a scale for each token", [&] {
    gather_kv(Context::cpu(), pool.view, csr_table(indices, indptr), kv_len, out.view(), v_out.view(), half);
  });
  Int8Pool latent(Int8Layout::kAlias, 1, 16, 1, 576, 512);
  std::vector<std::byte> rows(16 * 656 + 16);
  const KvCacheView ds_mla =
      make_fp8_ds_mla_view(1, 16, rows.data() + (16 - reinterpret_cast<uintptr_t>(rows.data()) % 16));
  expect_refused(
      "between fp8_ds_mla and int8", [&] { convert_pages(Context::cpu(), ds_mla, latent.view, page, page); },
      ErrorCode::kUnsupported);
  Int8Pool other(Int8Layout::kNhd, 2, 16, 2, 64, 64);
  other.view.k_token_scales = pool.view.k_token_scales;
  expect_refused("share memory, but are not the same cache",
                 [&] { copy_pages(Context::cpu(), pool.view, other.view, page, page); });
}

}  // namespace
}  // namespace folio::inline v0::attention
