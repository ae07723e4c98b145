#include <array>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/plain/attention/plain_kernel.hpp"
#include "kernels/cuda/sm80/attention/sm80_kernel.hpp"

namespace folio::inline v0::kernels::cuda {

std::span<const AttentionKernel* const> attention_kernels() {
  static constexpr std::array<const AttentionKernel*, 2> kAll{&sm80::kSm80Kernel, &plain::kPlainKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
