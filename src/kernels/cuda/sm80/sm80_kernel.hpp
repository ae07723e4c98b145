#pragma once

#include <string>

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm80 {

/// "cuda-sm80": tensor cores, for compute capability 8.0 and newer; docs/kernels/cuda_sm80.md.
extern const AttentionKernel kSm80Kernel;

// The parts of kSm80Kernel that need no CUDA toolkit: see AttentionKernel.

std::string refusal(const AttentionConfig& config);
scheduler::TileShape tile(const AttentionConfig& config);
DType p_dtype(const AttentionConfig& config);

/// Enqueues the instantiation of one type of K and V in shared memory (float16, bfloat16, or e4m3 that is dequantized
/// to float16) and of head dimensions of config.hpp. kernel.cuh defines it, instantiation.cu.in instantiates it.
template <DType Type, int32_t DimQk, int32_t DimV>
void launch_attention(const AttentionParams& params, int32_t num_workers, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::sm80
