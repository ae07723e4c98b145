#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90::latent {

/// "cuda-sm90-latent": head dimensions of latent attention, 576/512, on Hopper; docs/kernels/cuda_sm90_latent.md.
extern const AttentionKernel kSm90LatentKernel;

}  // namespace folio::inline v0::kernels::cuda::sm90::latent
