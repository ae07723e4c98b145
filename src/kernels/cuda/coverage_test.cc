// What the portable CPU kernel takes, some kernel of a GPU takes. Their answers need neither a GPU nor a toolkit.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/instrumented_test_util.hpp"
#include "kernels/attention_kernel.hpp"
#include "kernels/cuda/plain/plain_kernel.hpp"
#include "kernels/cuda/sm80/sm80_kernel.hpp"

namespace folio::kernels::cuda {
namespace {

constexpr DType kDtypes[] = {DType::kFloat32,    DType::kFloat16,    DType::kBFloat16,
                             DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat4E2M1x2};
constexpr MaskKind kMasks[] = {MaskKind::kNone, MaskKind::kCausal, MaskKind::kCustom};
constexpr uint32_t kAllFeatures = 16;

bool generic_takes(const AttentionConfig& config) {
  return generic::attention_kernels().front()->refusal(config).empty();
}
bool gpu_takes(const AttentionConfig& config) {
  return sm80::refusal(config).empty() || plain::refusal(config).empty();
}

std::string text_of(const AttentionConfig& c) {
  return std::to_string(c.head_dim_qk) + "/" + std::to_string(c.head_dim_v) + " q " + std::string(to_string(c.q)) +
         " kv " + std::string(to_string(c.kv)) + " ragged " + std::string(to_string(c.ragged_kv)) + " out " +
         std::string(to_string(c.out)) + " features " + std::to_string(c.features.bits) + ": " + sm80::refusal(c) +
         "; " + plain::refusal(c);
}

AttentionConfig small_config() {
  AttentionConfig config;
  config.num_q_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = 64;
  config.q = config.kv = config.ragged_kv = config.out = DType::kBFloat16;
  return config;
}

/// Calls `visit` with every combination of the inputs' and the output's types.
template <typename Visit>
void for_dtypes(AttentionConfig config, const Visit& visit) {
  for (const DType q : kDtypes) {
    for (const DType kv : kDtypes) {
      for (const DType ragged_kv : kDtypes) {
        for (const DType out : kDtypes) {
          config.q = q;
          config.kv = kv;
          config.ragged_kv = ragged_kv;
          config.out = out;
          visit(config);
        }
      }
    }
  }
}

TEST(CudaCoverage, EveryDtypeAndHeadDimOfTheGenericKernelIsTakenOnAGpu) {
  const std::vector<std::pair<int32_t, int32_t>> dims =
      folio::testing::kInstrumented
          ? std::vector<std::pair<int32_t, int32_t>>{{64, 64}, {576, 512}, {40, 72}}
          : std::vector<std::pair<int32_t, int32_t>>{{8, 8},     {16, 16},   {40, 72},   {64, 64},   {128, 128},
                                                     {192, 128}, {256, 256}, {264, 264}, {320, 320}, {576, 512},
                                                     {8, 512},   {576, 8},   {100, 64},  {584, 8},   {8, 520}};
  int64_t taken = 0;
  for (const auto& [qk, v] : dims) {
    AttentionConfig config = small_config();
    config.head_dim_qk = qk;
    config.head_dim_v = v;
    for (const bool rope : {false, true}) {
      config.features = rope ? Features(Feature::kRopeLlama) : Features();
      for_dtypes(config, [&](const AttentionConfig& c) {
        if (!generic_takes(c)) return;
        ++taken;
        ASSERT_TRUE(gpu_takes(c)) << text_of(c);
      });
    }
  }
  EXPECT_GT(taken, 1000);
}

TEST(CudaCoverage, EveryMaskFeaturePageSizeAndLevelOfDeterminismIsTakenOnAGpu) {
  int64_t taken = 0;
  for (uint32_t features = 0; features < kAllFeatures; ++features) {
    for (const MaskKind mask : kMasks) {
      for (const int32_t page_size : {1, 3, 16, 128}) {
        for (int32_t level = 0; level <= static_cast<int32_t>(Determinism::kScheduleInvariant); ++level) {
          for (const auto& [left, right] : {std::pair{-1, -1}, {0, 0}, {7, -1}, {100, 3}}) {
            for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
              AttentionConfig config = small_config();
              config.features.bits = features;
              config.mask = mask;
              config.page_size = page_size;
              config.determinism = static_cast<Determinism>(level);
              config.window_left = left;
              config.window_right = right;
              config.q = config.kv = config.ragged_kv = config.out = dtype;
              ASSERT_TRUE(generic_takes(config)) << text_of(config);
              ASSERT_TRUE(gpu_takes(config)) << text_of(config);
              ++taken;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(taken, 16 * 3 * 4 * 4 * 4 * 3);
}

/// Tensor cores compute all that needs no float32: head dimensions, outputs, masks.
TEST(CudaCoverage, TensorCoresTakeEveryHeadDimAndOutputOf16BitAndFp8Inputs) {
  for (const auto& [qk, v] : {std::pair{8, 16}, {64, 64}, {192, 128}, {256, 256}, {320, 320}, {576, 512}}) {
    for (const DType kv : {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      for (const DType out : kDtypes) {
        AttentionConfig config = small_config();
        config.head_dim_qk = qk;
        config.head_dim_v = v;
        config.kv = kv;
        config.out = out;
        config.mask = MaskKind::kCustom;
        EXPECT_EQ(sm80::refusal(config), "");
        EXPECT_LE(sm80::tile(config).rows, 128);
      }
    }
  }
}

/// The packed format is for a CPU's vector units; it stays the CPU's, and so do int8 caches.
TEST(CudaCoverage, WhatIsRefusedSaysWhatIsOffered) {
  const auto expect = [](const std::string& text, const auto& change) {
    AttentionConfig config = small_config();
    change(config);
    EXPECT_EQ(plain::refusal(config), text);
    EXPECT_FALSE(sm80::refusal(config).empty());
  };
  expect("kv_format is cpu_packed; this kernel takes strided and fp8_ds_mla caches",
         [](AttentionConfig& c) { c.kv_format = KvFormat::kCpuPacked; });
  expect("head_dim_qk is 100; cuda-plain takes multiples of 8 up to 576",
         [](AttentionConfig& c) { c.head_dim_qk = 100; });
  expect("head_dim_v is 520; cuda-plain takes multiples of 8 up to 512",
         [](AttentionConfig& c) { c.head_dim_v = 520; });
  expect("kv is fp4_e2m1x2; cuda-plain takes float32, float16, bfloat16, fp8_e4m3 and fp8_e5m2",
         [](AttentionConfig& c) { c.kv = DType::kFloat4E2M1x2; });
  expect("kv is int8; cuda-plain takes float32, float16, bfloat16, fp8_e4m3 and fp8_e5m2",
         [](AttentionConfig& c) { c.kv = DType::kInt8; });
  expect("head_dim_v is 72 with an NVFP4 output, which takes multiples of 16", [](AttentionConfig& c) {
    c.out = DType::kFloat4E2M1x2;
    c.head_dim_v = 72;
  });
}

}  // namespace
}  // namespace folio::kernels::cuda
