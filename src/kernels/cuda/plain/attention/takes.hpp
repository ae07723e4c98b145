#pragma once

#include <string>

#include "folio/types/attention.hpp"
#include "scheduler/plan_view.hpp"

/// What "cuda-plain" takes, which no toolkit is needed to know; see AttentionKernel.
namespace folio::inline v0::kernels::cuda::plain {

std::string refusal(const AttentionConfig& config);
scheduler::TileShape tile(const AttentionConfig& config);
DType p_dtype(const AttentionConfig& config);

}  // namespace folio::inline v0::kernels::cuda::plain
