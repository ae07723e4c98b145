#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm80 {

/// "cuda-sm80": tensor cores, for compute capability 8.0 and newer; docs/kernels/cuda_sm80.md.
extern const AttentionKernel kSm80Kernel;

}  // namespace folio::inline v0::kernels::cuda::sm80
