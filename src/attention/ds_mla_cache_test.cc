// Rows of KvFormat::kFp8DsMla: written, copied, gathered, converted.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/cache_test_util.hpp"
#include "core/expect_refused_test_util.hpp"
#include "folio/types/ds_mla.hpp"

namespace folio::inline v0::attention {
namespace {

using folio::testing::expect_refused;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A cache, and its rows as bytes.
struct DsMlaPool {
  explicit DsMlaPool(int64_t pages, int32_t page_size)
      : memory(static_cast<size_t>(pages * page_size * kDsMlaRowBytes + kDsMlaAlignment)),
        view(make_fp8_ds_mla_view(pages, page_size, aligned())) {}
  std::byte* aligned() {
    void* at = memory.data();
    size_t space = memory.size();
    return static_cast<std::byte*>(std::align(kDsMlaAlignment, memory.size() - kDsMlaAlignment, at, space));
  }
  const std::byte* row(int64_t slot) { return aligned() + slot * kDsMlaRowBytes; }
  float scale(int64_t slot, int64_t block) {
    return load_as_float(row(slot) + kDsMlaScalesOffset, DType::kFloat32, block);
  }

  std::vector<std::byte> memory;
  KvCacheView view;
};

CacheWriteArgs write_args(Rows& k, const std::vector<int64_t>& slots, const KvCacheView& cache) {
  CacheWriteArgs args;
  args.k = k.view();
  args.v = ConstTensorView(nullptr, k.dtype, {k.tokens, 1, kDsMlaLatentDim});
  args.slot_mapping = slots.data();
  args.num_slots = static_cast<int64_t>(slots.size());
  args.cache = cache;
  return args;
}

/// Expects that row `slot` is what token `token` becomes.
void expect_row(DsMlaPool& pool, int64_t slot, const Rows& k, int64_t token) {
  const auto element = [&](int64_t d) { return load_as_float(k.memory.data(), k.dtype, k.index(token, 0, d)); };
  for (int64_t block = 0; block < kDsMlaBlocks; ++block) {
    float most = 0.0f;
    for (int64_t i = 0; i < kDsMlaBlockDim; ++i) most = std::max(most, std::abs(element(block * kDsMlaBlockDim + i)));
    const float scale = most / 448.0f;
    ASSERT_EQ(pool.scale(slot, block), scale);
    for (int64_t i = 0; i < kDsMlaBlockDim; ++i) {
      const int64_t d = block * kDsMlaBlockDim + i;
      ASSERT_EQ(static_cast<uint8_t>(pool.row(slot)[d]), float_to_fp8_e4m3(element(d) / scale)) << d;
    }
  }
  for (int64_t i = 0; i < kDsMlaRopeDim; ++i) {
    const float stored = load_as_float(pool.row(slot) + kDsMlaRopeOffset, DType::kBFloat16, i);
    ASSERT_EQ(stored, bfloat16_to_float(float_to_bfloat16(element(kDsMlaLatentDim + i)))) << i;
  }
}

TEST(DsMlaCache, WritesRowsWithTheirScales) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    DsMlaPool pool(3, 4);
    Rows k(dtype, 4, 1, kDsMlaHeadDimQk, 5, 1);
    const std::vector<int64_t> slots{7, -1, 0, 11};
    write_kv_cache(Context::cpu(), write_args(k, slots, pool.view));
    for (const size_t token : {0u, 2u, 3u}) expect_row(pool, slots[token], k, static_cast<int64_t>(token));
    EXPECT_EQ(pool.row(1)[0], std::byte{0});  // not written
    EXPECT_EQ(pool.scale(1, 0), 0.0f);
  }
}

/// A block of zeros has a scale, NaN stays NaN, Inf becomes the largest value of its block and leaves the others alone.
TEST(DsMlaCache, WritesUnusualBlocks) {
  DsMlaPool pool(1, 1);
  Rows k(DType::kFloat32, 1, 1, kDsMlaHeadDimQk, 0, 2);
  auto* const values = reinterpret_cast<float*>(k.memory.data());
  std::fill_n(values, kDsMlaBlockDim, 0.0f);
  std::fill_n(values + kDsMlaBlockDim, kDsMlaBlockDim, 2.0f);
  values[kDsMlaBlockDim] = -kInfinity;
  values[2 * kDsMlaBlockDim] = std::numeric_limits<float>::quiet_NaN();
  write_kv_cache(Context::cpu(), write_args(k, {0}, pool.view));
  Rows out(DType::kFloat32, 1, 1, kDsMlaHeadDimQk, 0, 3), v_out(DType::kFloat32, 1, 1, kDsMlaLatentDim, 0, 4);
  const std::vector<int32_t> indices{0}, indptr{0, 1}, kv_len{1};
  gather_kv(Context::cpu(), pool.view, csr_table(indices, indptr), kv_len, out.view(), v_out.view());
  const auto* const read = reinterpret_cast<const float*>(out.memory.data());
  EXPECT_EQ(pool.scale(0, 0), std::numeric_limits<float>::min());
  EXPECT_EQ(read[5], 0.0f);
  EXPECT_EQ(read[kDsMlaBlockDim], -2.0f);
  EXPECT_EQ(read[kDsMlaBlockDim + 1], 2.0f);
  EXPECT_TRUE(std::isnan(read[2 * kDsMlaBlockDim]));
  EXPECT_TRUE(std::isfinite(read[2 * kDsMlaBlockDim + 1]));
}

/// What comes back differs by half a step of e4m3, which has four bits.
TEST(DsMlaCache, GathersWhatWasWritten) {
  constexpr int32_t kTokens = 9;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    DsMlaPool pool(4, 3);
    Rows k(DType::kFloat32, kTokens, 1, kDsMlaHeadDimQk, 0, 5);
    const std::vector<int32_t> indices{2, 0, 3}, indptr{0, 2, 3}, kv_len{6, 3};
    std::vector<int64_t> slots;
    for (const int32_t page : indices) {
      for (int64_t i = 0; i < 3; ++i) slots.push_back(page * 3 + i);
    }
    write_kv_cache(Context::cpu(), write_args(k, slots, pool.view));
    Rows k_out(dtype, kTokens, 1, kDsMlaHeadDimQk, 7, 6), v_out(dtype, kTokens, 1, kDsMlaLatentDim, 0, 7);
    gather_kv(Context::cpu(), pool.view, csr_table(indices, indptr), kv_len, k_out.view(), v_out.view());
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int64_t d = 0; d < kDsMlaHeadDimQk; ++d) {
        const float given = load_as_float(k.memory.data(), k.dtype, k.index(token, 0, d));
        const float got = load_as_float(k_out.memory.data(), dtype, k_out.index(token, 0, d));
        const int64_t slot = slots[static_cast<size_t>(token)];
        const float step = d < kDsMlaLatentDim ? 0x1p-9f * pool.scale(slot, d / kDsMlaBlockDim) : 0.0f;
        ASSERT_NEAR(got, given, std::abs(given) * 0x1p-4f * 1.05f + step) << d;
        if (d >= kDsMlaLatentDim) continue;
        ASSERT_EQ(load_as_float(v_out.memory.data(), dtype, v_out.index(token, 0, d)), got) << d;
      }
    }
  }
}

TEST(DsMlaCache, CopiesPagesBitByBit) {
  DsMlaPool from(3, 5), to(4, 5);
  std::mt19937 random(8);
  for (std::byte& byte : from.memory) byte = static_cast<std::byte>(random());
  const std::vector<int32_t> source{2, 0}, destination{1, 3};
  copy_pages(Context::cpu(), from.view, to.view, source, destination);
  EXPECT_EQ(std::memcmp(to.row(5), from.row(10), 5 * kDsMlaRowBytes), 0);
  EXPECT_EQ(std::memcmp(to.row(15), from.row(0), 5 * kDsMlaRowBytes), 0);
  EXPECT_EQ(to.row(0)[0], std::byte{0});
}

/// To a strided cache and back: a value of e4m3 times its block's scale is written as the same value, where the scale
/// is a power of two.
TEST(DsMlaCache, ConvertsPages) {
  Pool strided(Layout::kNhd, {2, 4, 1, kDsMlaHeadDimQk, kDsMlaLatentDim, DType::kFloat32}, 9);
  KvCacheView cache = strided.view();
  cache.v = cache.k;
  cache.v_strides = cache.k_strides;
  std::mt19937 random(10);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < 2 * 4 * kDsMlaHeadDimQk; ++i) {
    const float code = i % kDsMlaBlockDim == 0 ? 448.0f : fp8_e4m3_to_float(float_to_fp8_e4m3(100.0f * normal(random)));
    static_cast<float*>(cache.k)[i] = bfloat16_to_float(float_to_bfloat16(code * 0x1p-5f));
  }
  const std::vector<std::byte> before = strided.memory;
  DsMlaPool pool(3, 4);
  const std::vector<int32_t> pages{1, 0}, places{0, 2};
  convert_pages(Context::cpu(), cache, pool.view, pages, places);
  EXPECT_EQ(pool.scale(0, 0), 0x1p-5f);
  Pool back(Layout::kNhd, strided.shape, 11);
  KvCacheView again = back.view();
  again.v = again.k;
  again.v_strides = again.k_strides;
  convert_pages(Context::cpu(), pool.view, again, places, pages);
  EXPECT_EQ(std::memcmp(again.k, cache.k, static_cast<size_t>(k_elements(strided.shape)) * sizeof(float)), 0);
  EXPECT_EQ(strided.memory, before);
}

TEST(DsMlaCache, Refuses) {
  DsMlaPool pool(2, 16);
  Rows k(DType::kBFloat16, 1, 1, kDsMlaHeadDimQk, 0, 12);
  const std::vector<int64_t> slots{0};
  const CacheWriteArgs good = write_args(k, slots, pool.view);
  const auto refused = [&](const std::string& text, const auto& change) {
    CacheWriteArgs args = good;
    change(args);
    expect_refused(text, [&] { write_kv_cache(Context::cpu(), args); });
  };
  refused("rows of fp8_ds_mla have scales of their own", [](CacheWriteArgs& args) { args.k_scale.value = 0.5f; });
  refused("v is given", [&](CacheWriteArgs& args) { args.v.data = k.memory.data(); });
  refused("fp8 input", [](CacheWriteArgs& args) { args.k.dtype = DType::kFloat8E4M3; });
  refused("it has fp8_e4m3, 1, 576 and 512", [](CacheWriteArgs& args) { args.cache.head_dim_v = 576; });
  refused("differ from k's", [](CacheWriteArgs& args) { args.cache.v_strides.token += 16; });
  refused("multiples of 16 bytes",
          [](CacheWriteArgs& args) { args.cache.k_strides.token = args.cache.v_strides.token = 660; });
  refused("make tokens overlap",
          [](CacheWriteArgs& args) { args.cache.k_strides.token = args.cache.v_strides.token = 576; });
  Pool packed(Layout::kPacked, {2, 16, 1, kDsMlaHeadDimQk, kDsMlaLatentDim, DType::kBFloat16}, 13);
  const std::vector<int32_t> page{0};
  expect_refused(
      "converted to and from strided caches",
      [&] { convert_pages(Context::cpu(), pool.view, packed.view(), page, page); }, ErrorCode::kUnsupported);
  expect_refused("page_size is 0", [] { make_fp8_ds_mla_view(0, 0, nullptr); });
  std::vector<std::byte>& memory = pool.memory;
  expect_refused("multiples of 16 bytes", [&] {
    make_fp8_ds_mla_view(1, 1, memory.data() + (reinterpret_cast<uintptr_t>(memory.data()) % 16 == 8 ? 0 : 8));
  });
}

}  // namespace
}  // namespace folio::inline v0::attention
