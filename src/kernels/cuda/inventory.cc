#include <array>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/plain/attention/plain_kernel.hpp"

namespace folio::inline v0::kernels::cuda {

std::span<const AttentionKernel* const> attention_kernels() {
  static constexpr std::array<const AttentionKernel*, 1> kAll{&plain::kPlainKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
