#include <gtest/gtest.h>

#include <cmath>
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

}  // namespace
}  // namespace folio
