#pragma once

#include <string>

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::plain {

/// "cuda-plain": the reference kernel of the GPU; docs/kernels/cuda_plain.md.
extern const AttentionKernel kPlainKernel;

// The parts of kPlainKernel that need no CUDA toolkit: see AttentionKernel.
std::string refusal(const AttentionConfig& config);
scheduler::TileShape tile(const AttentionConfig& config);
DType p_dtype(const AttentionConfig& config);

}  // namespace folio::inline v0::kernels::cuda::plain
