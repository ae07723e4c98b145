#include <array>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/plain/attention/plain_kernel.hpp"
#include "kernels/cuda/sm80/attention/sm80_kernel.hpp"
#include "kernels/cuda/sm90/decode/decode_kernel.hpp"

namespace folio::inline v0::kernels::cuda {

std::span<const AttentionKernel* const> attention_kernels() {
  // The kernel of Hopper comes last, to be asked for by name, until it has been measured.
  static constexpr std::array<const AttentionKernel*, 3> kAll{&sm80::kSm80Kernel, &plain::kPlainKernel,
                                                              &sm90::kSm90DecodeKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
