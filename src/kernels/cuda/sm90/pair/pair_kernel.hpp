#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {

/// "cuda-sm90": the kernels of Hopper for few and for many rows, of one op;
/// docs/decisions/0032-an-op-is-a-list-of-passes.md.
extern const AttentionKernel kSm90Kernel;

}  // namespace folio::inline v0::kernels::cuda::sm90
