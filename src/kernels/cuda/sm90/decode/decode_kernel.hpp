#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90::decode {

/// "cuda-sm90-decode": few query rows against long keys, on Hopper; docs/kernels/cuda_sm90_decode.md.
extern const AttentionKernel kSm90DecodeKernel;

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
