#include <cstring>
#include <random>

#include "device_array.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::cuda_test {
namespace {

struct WriteCase {
  DType input;
  DType cache;
  bool hnd;
  int64_t head_dim_v;
};

class CacheWrite : public CudaTest, public testing::WithParamInterface<WriteCase> {};

/// The bytes that the same write leaves on a CPU: negative slots skipped, scales per head for fp8.
TEST_P(CacheWrite, EqualsTheCpu) {
  const WriteCase& c = GetParam();
  constexpr int32_t kHeads = 3;
  constexpr int32_t kDim = 24;
  constexpr int64_t kTokens = 70;
  const KvCacheShape shape{9, 16, kHeads, kDim, static_cast<int32_t>(c.head_dim_v), c.cache};
  const auto bytes = [&](int64_t elements, DType dtype) { return static_cast<size_t>(elements * size_of(dtype)); };
  std::mt19937 random(5);
  std::normal_distribution<float> value(0.0f, 200.0f);  // some saturate
  const auto random_input = [&](int64_t dim) {
    std::vector<std::byte> data(bytes(kTokens * kHeads * dim, c.input));
    for (int64_t i = 0; i < kTokens * kHeads * dim; ++i) store_from_float(data.data(), c.input, i, value(random));
    return data;
  };
  const std::vector<std::byte> k = random_input(kDim);
  const std::vector<std::byte> v = random_input(c.head_dim_v);
  std::vector<int64_t> slots(shape.num_pages * 16);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int64_t>(i);
  std::shuffle(slots.begin(), slots.end(), random);
  slots.resize(kTokens);
  for (size_t i = 0; i < slots.size(); i += 7) slots[i] = -1 - static_cast<int64_t>(i);
  const std::vector<float> scales{0.5f, 2.0f, 3.0f};
  std::vector<std::byte> cache_k(bytes(k_elements(shape), c.cache), std::byte{0x3a});
  std::vector<std::byte> cache_v(bytes(v_elements(shape), c.cache), std::byte{0x3a});

  const auto write = [&](const Context& context, const void* k_at, const void* v_at, const int64_t* slots_at,
                         const float* scales_at, void* cache_k_at, void* cache_v_at) {
    CacheWriteArgs args;
    args.k = ConstTensorView(k_at, c.input, {kTokens, kHeads, kDim});
    args.v = ConstTensorView(v_at, c.input, {kTokens, kHeads, c.head_dim_v});
    args.slot_mapping = slots_at;
    args.num_slots = kTokens;
    args.cache = c.hnd ? make_hnd_view(shape, cache_k_at, cache_v_at) : make_nhd_view(shape, cache_k_at, cache_v_at);
    if (is_fp8(c.cache) && c.input != c.cache) {
      args.k_scale = {.value = 1.0f, .data = scales_at, .granularity = ScaleGranularity::kPerHead, .request_stride = 0};
      args.v_scale.value = 0.25f;
    }
    write_kv_cache(context, args);
  };
  const DeviceArray<std::byte> k_on_gpu(k), v_on_gpu(v), cache_k_on_gpu(cache_k), cache_v_on_gpu(cache_v);
  const DeviceArray<int64_t> slots_on_gpu(slots);
  const DeviceArray<float> scales_on_gpu(scales);
  write(Context::cuda(0), k_on_gpu.data(), v_on_gpu.data(), slots_on_gpu.data(), scales_on_gpu.data(),
        cache_k_on_gpu.data(), cache_v_on_gpu.data());
  write(Context::cpu(), k.data(), v.data(), slots.data(), scales.data(), cache_k.data(), cache_v.data());
  EXPECT_TRUE(cache_k_on_gpu.get() == cache_k);
  EXPECT_TRUE(cache_v_on_gpu.get() == cache_v);
}

INSTANTIATE_TEST_SUITE_P(Types, CacheWrite,
                         testing::Values(WriteCase{DType::kBFloat16, DType::kBFloat16, false, 24},
                                         WriteCase{DType::kFloat16, DType::kFloat16, true, 16},
                                         WriteCase{DType::kFloat32, DType::kFloat32, false, 24},
                                         WriteCase{DType::kFloat32, DType::kBFloat16, true, 24},
                                         WriteCase{DType::kBFloat16, DType::kFloat16, false, 40},
                                         WriteCase{DType::kFloat16, DType::kFloat8E4M3, false, 24},
                                         WriteCase{DType::kBFloat16, DType::kFloat8E5M2, true, 24},
                                         WriteCase{DType::kFloat8E4M3, DType::kFloat8E4M3, false, 24}),
                         [](const auto& types) {
                           return std::string(to_string(types.param.input)) + "_to_" +
                                  std::string(to_string(types.param.cache));
                         });

/// Slots lie on the device, where nothing checks them beforehand: one beyond the cache is skipped.
TEST_F(CudaTest, SlotsBeyondTheCacheAreSkipped) {
  const TableChecks checks(false);
  const KvCacheShape shape{2, 16, 1, 8, 8, DType::kFloat32};
  const std::vector<float> input(3 * 8, 1.0f);
  const DeviceArray<float> k(input), v(input);
  const DeviceArray<int64_t> slots(std::vector<int64_t>{32, INT64_MAX, 31});
  DeviceArray<float> cache_k(2 * 16 * 8), cache_v(2 * 16 * 8);
  cache_k.fill(0);
  cache_v.fill(0);
  CacheWriteArgs args;
  args.k = ConstTensorView(k.data(), DType::kFloat32, {3, 1, 8});
  args.v = ConstTensorView(v.data(), DType::kFloat32, {3, 1, 8});
  args.slot_mapping = slots.data();
  args.num_slots = 3;
  args.cache = make_nhd_view(shape, cache_k.data(), cache_v.data());
  write_kv_cache(Context::cuda(0), args);
  std::vector<float> expected(2 * 16 * 8, 0.0f);
  std::fill(expected.end() - 8, expected.end(), 1.0f);
  EXPECT_EQ(cache_k.get(), expected);
  EXPECT_EQ(cache_v.get(), expected);
}

}  // namespace
}  // namespace folio::cuda_test
