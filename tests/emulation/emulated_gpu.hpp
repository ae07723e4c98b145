#pragma once

#include <vector>

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::attention::emulation {

/// What the emulated GPU offers: cuda-sm90-decode, and what a test adds.
std::vector<const kernels::cuda::AttentionKernel*>& kernels();

}  // namespace folio::inline v0::attention::emulation
