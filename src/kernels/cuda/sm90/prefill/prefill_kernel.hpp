#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// "cuda-sm90-prefill": many query rows against keys, on Hopper; docs/kernels/cuda_sm90_prefill.md.
extern const AttentionKernel kSm90PrefillKernel;

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
