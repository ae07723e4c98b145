#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::plain {

/// "cuda-plain": correct before fast, without tensor cores; docs/kernels/cuda_plain.md.
extern const AttentionKernel kPlainKernel;

}  // namespace folio::inline v0::kernels::cuda::plain
