#include "kernels/cpu/amx/emulated_kernel_test_util.hpp"

namespace folio::inline v0::kernels {

std::span<const AttentionKernel* const> cpu_attention_kernels() {
  static const AttentionKernel* const kernels[] = {&amx::emulated_kernel()};
  return kernels;
}

}  // namespace folio::inline v0::kernels
