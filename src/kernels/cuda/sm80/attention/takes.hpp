#pragma once

#include <string>

#include "folio/types/attention.hpp"
#include "scheduler/plan_view.hpp"

/// What "cuda-sm80" takes, which no toolkit is needed to know; see AttentionKernel.
namespace folio::inline v0::kernels::cuda::sm80 {

/// The 16-bit type that everything is widened to: the one among the inputs', bfloat16 where all are fp8; kUnset where
/// inputs are of two 16-bit types, or of others.
DType compute_type(DType q, DType kv, DType ragged_kv);

std::string refusal(const AttentionConfig& config);
scheduler::TileShape tile(const AttentionConfig& config);
DType p_dtype(const AttentionConfig& config);

}  // namespace folio::inline v0::kernels::cuda::sm80
