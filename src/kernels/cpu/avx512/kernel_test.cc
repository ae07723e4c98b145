#include <gtest/gtest.h>

#include <string>

#include "kernels/attention_kernel.hpp"

namespace folio::inline v0::kernels {
namespace {

TEST(Avx512Kernels, Bf16_CpuWithSlowDotProducts_IsAvailableAndCostsMore) {
  platform::CpuFeatures features;
  features.avx2 = features.fma = features.f16c = features.bmi1 = features.bmi2 = features.lzcnt = features.movbe = true;
  features.avx512f = features.avx512bw = features.avx512cd = features.avx512dq = features.avx512vl =
      features.avx512vbmi = true;
  const AttentionKernel& kernel = *avx512::attention_kernels()[1];
  const AttentionKernel& plain = *avx512::attention_kernels()[0];
  const auto costs_less = [&] {
    AttentionConfig config;
    config.head_dim_qk = config.head_dim_v = 128;
    return kernel.cost(features, config, 4) < plain.cost(features, config, 4);
  };
  ASSERT_STREQ(kernel.name, "avx512-bf16");
  EXPECT_NE(kernel.unavailable(features).find("AVX512_BF16"), std::string::npos);
  features.avx512_bf16 = true;
  EXPECT_EQ(kernel.unavailable(features), "");
  EXPECT_TRUE(costs_less());
  features.avx512_fp16 = true;
  EXPECT_EQ(kernel.unavailable(features), "");
  EXPECT_FALSE(costs_less());
}

}  // namespace
}  // namespace folio::inline v0::kernels
