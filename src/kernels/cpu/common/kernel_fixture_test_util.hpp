#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/cpu/common/attention_case_test_util.hpp"

namespace folio::inline v0::kernels {

/// Runs a test with every kernel of the inventory that this machine can run.
class CpuKernels : public ::testing::TestWithParam<const AttentionKernel*> {
 protected:
  void SetUp() override {
    const std::string missing = GetParam()->unavailable(platform::cpu_features());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

inline std::string kernel_test_name(const ::testing::TestParamInfo<const AttentionKernel*>& kernel) {
  std::string name = kernel.param->name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

/// float32 throughout, causal, pages of 16, 4 query heads over 2 KV heads.
inline AttentionConfig plain_config(int32_t head_dim = 64) {
  AttentionConfig config;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = head_dim;
  config.q = config.kv = config.ragged_kv = config.out = DType::kFloat32;
  return config;
}

/// Those of the inventory that take every dtype and format: kernels of a single one have tests of their own.
inline std::vector<const AttentionKernel*> every_cpu_kernel() {
  std::vector<const AttentionKernel*> kernels;
  for (const AttentionKernel* kernel : cpu_attention_kernels()) {
    if (kernel->refusal(plain_config()).empty()) kernels.push_back(kernel);
  }
  return kernels;
}

}  // namespace folio::inline v0::kernels
