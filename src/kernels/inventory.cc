#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/generic/attention/generic_kernels.hpp"

namespace folio::inline v0::kernels {

std::span<const AttentionKernel* const> cpu_attention_kernels() {
  return generic::attention_kernels();
}

}  // namespace folio::inline v0::kernels
