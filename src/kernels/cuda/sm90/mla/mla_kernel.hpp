#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90::mla {

/// "cuda-sm90-mla": head dimensions of latent attention, 576/512, on Hopper; docs/kernels/cuda_sm90_mla.md.
extern const AttentionKernel kSm90MlaKernel;

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
