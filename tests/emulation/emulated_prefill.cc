#include <array>

#include "emulated_kernels.hpp"
#include "kernels/cuda/sm90/prefill/launch.hpp"

namespace folio::inline v0::kernels::cuda {

std::span<const AttentionKernel* const> emulated_kernels() {
  static constexpr std::array<const AttentionKernel*, 1> kAll{&sm90::prefill::kSm90PrefillKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
