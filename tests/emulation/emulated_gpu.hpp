#pragma once

#include <vector>

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::attention::emulation {

/// What the emulated GPU offers: the program's kernels, and what a test adds.
std::vector<const kernels::cuda::AttentionKernel*>& kernels();

}  // namespace folio::inline v0::attention::emulation
