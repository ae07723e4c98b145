#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "folio/kv_cache.hpp"
#include "folio/kvcache/kv_pool.hpp"
#include "folio/kvcache/token_allocator.hpp"
#include "folio/page_table.hpp"
#include "folio/types/float_convert.hpp"

/// A pool's cache writes, from allocation to reading back: what pymllm's set_kv_buffer does, and what it could not do.
namespace folio {
namespace {

constexpr int32_t kHeads = 2;
constexpr int32_t kDim = 16;
constexpr int32_t kTokens = 6;

struct Case {
  DType dtype = DType::kFloat16;
  int32_t page_size = 1;
  KvPoolLayout layout = KvPoolLayout::kTokenMajor;
  float k_scale = 1;
  float v_scale = 1;
};

class KvPoolWrite : public ::testing::TestWithParam<Case> {
 protected:
  /// Values that every dtype holds after division by a power of two: small multiples of 1/4.
  static float value(int32_t token, int32_t head, int32_t d) {
    return 0.25f * static_cast<float>((token * 5 + head * 3 + d) % 15 - 7);
  }
};

TEST_P(KvPoolWrite, KeepsWhatIsWritten) {
  const Case& c = GetParam();
  KvPoolConfig config;
  config.num_slots = 64;
  config.page_size = c.page_size;
  config.num_layers = 2;
  config.num_kv_heads = kHeads;
  config.head_dim_qk = config.head_dim_v = kDim;
  config.dtype = c.dtype;
  config.layout = c.layout;
  KvPool pool(config);
  if (is_fp8(c.dtype)) {
    Scale k;
    Scale v;
    k.value = c.k_scale;
    v.value = c.v_scale;
    pool.set_scales(1, k, v);
  }
  TokenAllocator allocator(config.num_slots, config.page_size);
  std::vector<int32_t> slots(kTokens);
  ASSERT_TRUE(allocator.alloc(slots));

  // [batch 2, tokens 4, heads, dim] with two padding tokens, which go to the dummy slot and nowhere.
  const std::vector<int64_t> locations{slots[0], slots[1], slots[2], 0, slots[3], slots[4], slots[5], -1};
  std::vector<float> k(locations.size() * kHeads * kDim, 99.0f);
  std::vector<float> v = k;
  int32_t token = 0;
  for (size_t i = 0; i < locations.size(); ++i) {
    if (locations[i] <= 0) continue;
    for (int32_t h = 0; h < kHeads; ++h) {
      for (int32_t d = 0; d < kDim; ++d) {
        const size_t at = (i * kHeads + static_cast<size_t>(h)) * kDim + static_cast<size_t>(d);
        k[at] = value(token, h, d);
        v[at] = -value(token, h, d);
      }
    }
    ++token;
  }
  const Context context = Context::cpu();
  const ConstTensorView keys(k.data(), DType::kFloat32, {2, 4, kHeads, kDim});
  const ConstTensorView values(v.data(), DType::kFloat32, {8, kHeads * kDim});
  write_kv_cache(context, pool.write_args(1, keys, values, locations));

  std::vector<int32_t> pages;
  for (int32_t t = 0; t < kTokens; t += c.page_size) pages.push_back(slots[static_cast<size_t>(t)] / c.page_size);
  const std::vector<int32_t> indptr{0, static_cast<int32_t>(pages.size())};
  const std::vector<int32_t> kv_len{kTokens};
  std::vector<float> k_out(kTokens * kHeads * kDim);
  std::vector<float> v_out = k_out;
  gather_kv(context, pool.view(1), csr_table(pages, indptr), kv_len,
            TensorView(k_out.data(), DType::kFloat32, {kTokens, kHeads, kDim}),
            TensorView(v_out.data(), DType::kFloat32, {kTokens, kHeads, kDim}), pool.k_scale(1), pool.v_scale(1));
  for (int32_t t = 0; t < kTokens; ++t) {
    for (int32_t h = 0; h < kHeads; ++h) {
      for (int32_t d = 0; d < kDim; ++d) {
        const auto at = static_cast<size_t>((t * kHeads + h) * kDim + d);
        ASSERT_EQ(k_out[at], value(t, h, d)) << t << ' ' << h << ' ' << d;
        ASSERT_EQ(v_out[at], -value(t, h, d)) << t << ' ' << h << ' ' << d;
      }
    }
  }
  if (c.layout == KvPoolLayout::kTokenMajor && c.dtype == DType::kFloat16) {
    // The other layer and slots that were not written are as they were; the dummy slot took the padding token.
    const auto* layer0 = static_cast<const uint16_t*>(pool.view(0).k);
    const auto* layer1 = static_cast<const uint16_t*>(pool.view(1).k);
    const int64_t row = int64_t{kHeads} * kDim;
    for (int64_t i = 0; i < pool.buffer_len() * row; ++i) {
      ASSERT_EQ(layer0[i], 0);
      const auto slot = static_cast<int32_t>(i / row);
      if (slot > 0 && !allocator.is_held(slot)) {
        ASSERT_EQ(layer1[i], 0);
      }
    }
    EXPECT_NE(layer1[0], 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Pools, KvPoolWrite,
                         ::testing::Values(Case{}, Case{DType::kBFloat16, 16}, Case{DType::kFloat32, 4},
                                           Case{DType::kFloat16, 16, KvPoolLayout::kHeadMajor},
                                           Case{DType::kFloat16, 16, KvPoolLayout::kCpuPacked},
                                           // pymllm took an fp8 pool and could not store into it.
                                           Case{DType::kFloat8E4M3, 1, KvPoolLayout::kTokenMajor, 0.5f, 0.25f},
                                           Case{DType::kFloat8E5M2, 4, KvPoolLayout::kTokenMajor, 2.0f, 1.0f},
                                           Case{DType::kFloat8E4M3, 16, KvPoolLayout::kCpuPacked, 0.5f, 0.25f}));

/// The shape of mllm-kernel's tests/test_store_cache.py: 257 rows of 1,024 elements into shuffled slots of 4,096, every
/// byte.
TEST(StoreCache, MovesRowsByteForByte) {
  constexpr int32_t kRows = 257;
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    KvPoolConfig config;
    config.num_slots = 4096;
    config.num_layers = 1;
    config.num_kv_heads = 8;
    config.head_dim_qk = config.head_dim_v = 128;
    config.dtype = dtype;
    KvPool pool(config);
    const size_t row = 1024 * static_cast<size_t>(size_of(dtype));
    std::vector<unsigned char> k(kRows * row);
    for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<unsigned char>((i * 37 + i / row) % 120);  // finite values
    const std::vector<unsigned char> v(k.rbegin(), k.rend());
    std::vector<int64_t> slots;
    for (int64_t r = 0; r < kRows; ++r) slots.push_back(1 + r * 1723 % 4096);
    write_kv_cache(Context::cpu(), pool.write_args(0, ConstTensorView(k.data(), dtype, {kRows, 8, 128}),
                                                   ConstTensorView(v.data(), dtype, {kRows, 1024}), slots));
    const auto* const k_stored = static_cast<const unsigned char*>(pool.view(0).k);
    const auto* const v_stored = static_cast<const unsigned char*>(pool.view(0).v);
    std::vector<int32_t> writer(static_cast<size_t>(pool.buffer_len()), -1);
    for (int32_t r = 0; r < kRows; ++r) writer[static_cast<size_t>(slots[static_cast<size_t>(r)])] = r;
    const std::vector<unsigned char> nothing(row, 0);
    for (size_t slot = 0; slot < writer.size(); ++slot) {
      const int32_t r = writer[slot];
      const unsigned char* const k_want = r < 0 ? nothing.data() : k.data() + static_cast<size_t>(r) * row;
      const unsigned char* const v_want = r < 0 ? nothing.data() : v.data() + static_cast<size_t>(r) * row;
      ASSERT_EQ(std::memcmp(k_stored + slot * row, k_want, row), 0) << to_string(dtype) << ", slot " << slot;
      ASSERT_EQ(std::memcmp(v_stored + slot * row, v_want, row), 0) << to_string(dtype) << ", slot " << slot;
    }
  }
}

}  // namespace
}  // namespace folio
