#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::plain {

/// AttentionKernel::launch of "cuda-plain".
void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::plain
