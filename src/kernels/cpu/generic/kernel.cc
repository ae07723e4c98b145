
#include <array>

#include "kernels/cpu/common/kernel.hpp"
#include "kernels/cpu/generic/collective.hpp"

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
#endif

}  // namespace

std::span<const AttentionKernel* const> attention_kernels() {
  static const AttentionKernel baseline =
      cpu::attention_kernel<kBaselineCollective>("generic", always_available, KvFormat::kStrided);
#if defined(__x86_64__)
  static const AttentionKernel v3 =
      cpu::attention_kernel<kV3Collective>("generic-v3", cpu::needs_v3, KvFormat::kStrided);
  static const AttentionKernel v4 = cpu::attention_kernel<kV4Collective>("generic-v4", needs_v4, KvFormat::kStrided);
  static const std::array<const AttentionKernel*, 3> all{&v4, &v3, &baseline};
#elif defined(__aarch64__)
  static const AttentionKernel bf16 =
      cpu::attention_kernel<kBf16Collective>("generic-bf16", needs_bf16, KvFormat::kStrided);
  static const std::array<const AttentionKernel*, 2> all{&bf16, &baseline};
#else
  static const std::array<const AttentionKernel*, 1> all{&baseline};
#endif
  return all;
}

}  // namespace folio::inline v0::kernels::generic
