#pragma once

#include <span>

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda {

/// Those of the emulated GPU of this program.
std::span<const AttentionKernel* const> emulated_kernels();

}  // namespace folio::inline v0::kernels::cuda
