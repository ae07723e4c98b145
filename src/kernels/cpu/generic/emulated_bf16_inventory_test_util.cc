#include "kernels/cpu/common/kernel.hpp"

/// An inventory of one kernel: generic-bf16 with BFMMLA in software, on any x86-64.
namespace folio::inline v0::kernels {
namespace generic {
extern const cpu::Collective kEmulatedBf16Collective;
}  // namespace generic

std::span<const AttentionKernel* const> cpu_attention_kernels() {
  static const AttentionKernel kernel = cpu::attention_kernel<generic::kEmulatedBf16Collective>(
      "generic-bf16-emulated", [](const platform::CpuFeatures&) { return std::string(); }, KvFormat::kStrided);
  static const AttentionKernel* const kernels[] = {&kernel};
  return kernels;
}

}  // namespace folio::inline v0::kernels
