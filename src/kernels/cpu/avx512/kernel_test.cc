#include <gtest/gtest.h>

#include <string>

#include "kernels/attention_kernel.hpp"

namespace folio::inline v0::kernels {
namespace {

TEST(Avx512Kernels, Bf16_CpuWithSlowDotProducts_IsAvailableAndNotPreferred) {
  platform::CpuFeatures features;
  features.avx2 = features.fma = features.f16c = features.bmi1 = features.bmi2 = features.lzcnt = features.movbe = true;
  features.avx512f = features.avx512bw = features.avx512cd = features.avx512dq = features.avx512vl =
      features.avx512vbmi = true;
  const AttentionKernel& kernel = *avx512::attention_kernels()[0];
  ASSERT_STREQ(kernel.name, "avx512-bf16");
  EXPECT_NE(kernel.unavailable(features).find("AVX512_BF16"), std::string::npos);
  features.avx512_bf16 = true;
  EXPECT_EQ(kernel.unavailable(features), "");
  EXPECT_TRUE(kernel.preferred(features, AttentionConfig{}));
  features.avx512_fp16 = true;
  EXPECT_EQ(kernel.unavailable(features), "");
  EXPECT_FALSE(kernel.preferred(features, AttentionConfig{}));
}

}  // namespace
}  // namespace folio::inline v0::kernels
