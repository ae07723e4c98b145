#include <array>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/plain/attention/plain_kernel.hpp"
#include "kernels/cuda/sm80/attention/sm80_kernel.hpp"
#include "kernels/cuda/sm90/decode/decode_kernel.hpp"
#include "kernels/cuda/sm90/mla/mla_kernel.hpp"
#include "kernels/cuda/sm90/pair/pair_kernel.hpp"
#include "kernels/cuda/sm90/prefill/launch.hpp"

namespace folio::inline v0::kernels::cuda {

std::span<const AttentionKernel* const> attention_kernels() {
  // The two halves of Hopper's pair come last, to be asked for by name.
  static constexpr std::array<const AttentionKernel*, 6> kAll{
      &sm90::kSm90Kernel,   &sm90::mla::kSm90MlaKernel,       &sm80::kSm80Kernel,
      &plain::kPlainKernel, &sm90::decode::kSm90DecodeKernel, &sm90::prefill::kSm90PrefillKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
