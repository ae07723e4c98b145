#pragma once

#include <string>

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm80 {

/// "cuda-sm80": tensor cores, for compute capability 8.0 and newer; docs/kernels/cuda_sm80.md.
extern const AttentionKernel kSm80Kernel;

// The parts of kSm80Kernel that need no CUDA toolkit: see AttentionKernel.

/// The 16-bit type of the MMA: the one among the inputs' types, bfloat16 where all are fp8; kUnset where the inputs
/// have two 16-bit types, or others.
DType compute_type(DType q, DType kv, DType ragged_kv);

std::string refusal(const AttentionConfig& config);
scheduler::TileShape tile(const AttentionConfig& config);
DType p_dtype(const AttentionConfig& config);

/// Enqueues the instantiation of one type of K and V in shared memory (float16, bfloat16, or e4m3 that is dequantized
/// to float16) and of head dimensions of config.hpp. kernel.cuh defines it, instantiation.cu.in instantiates it.
template <DType Type, int32_t DimQk, int32_t DimV>
void launch_attention(const AttentionParams& params, int32_t num_workers, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::sm80
