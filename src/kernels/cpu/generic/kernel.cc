
#include <array>

#include "kernels/cpu/common/kernel.hpp"
#include "kernels/cpu/generic/collective.hpp"
#include "kernels/cpu/generic/costs.hpp"

namespace folio::inline v0::kernels::generic {
namespace {

std::string always_available(const platform::CpuFeatures&) {
  return {};
}

#if defined(__x86_64__)
std::string needs_v4(const platform::CpuFeatures& features) {
  return features.x86_64_v4() ? "" : "the CPU or the OS lacks x86-64-v4 (AVX-512 F, BW, DQ, VL)";
}
#elif defined(__aarch64__)
std::string needs_bf16(const platform::CpuFeatures& features) {
  return features.bf16 ? "" : "the CPU or the OS lacks FEAT_BF16 (BFMMLA)";
}

double bf16_cost(const platform::CpuFeatures&, const AttentionConfig& config, double rows) {
  const double cost = cpu::cost(kBaselineCosts, config, rows);
  return config.kv == DType::kBFloat16 ? kBf16Share * cost : cost;
}
#endif

}  // namespace

std::span<const AttentionKernel* const> attention_kernels() {
  static const AttentionKernel baseline =
      cpu::attention_kernel<kBaselineCollective, kBaselineCosts>("generic", always_available);
#if defined(__x86_64__)
  static const AttentionKernel v3 = cpu::attention_kernel<kV3Collective, kV3Costs>("generic-v3", cpu::needs_v3);
  static const AttentionKernel v4 = cpu::attention_kernel<kV4Collective, kV4Costs>("generic-v4", needs_v4);
  static const std::array<const AttentionKernel*, 3> all{&v4, &v3, &baseline};
#elif defined(__aarch64__)
  static const AttentionKernel bf16 = [] {
    AttentionKernel kernel = cpu::attention_kernel<kBf16Collective, kBaselineCosts>("generic-bf16", needs_bf16);
    kernel.cost = bf16_cost;
    return kernel;
  }();
  static const std::array<const AttentionKernel*, 2> all{&bf16, &baseline};
#else
  static const std::array<const AttentionKernel*, 1> all{&baseline};
#endif
  return all;
}

}  // namespace folio::inline v0::kernels::generic
