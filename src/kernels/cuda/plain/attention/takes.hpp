#pragma once

#include <string>

#include "folio/types/attention.hpp"
#include "planner/plan_view.hpp"

/// What "cuda-plain" takes, which no toolkit is needed to know; see AttentionKernel.
namespace folio::inline v0::kernels::cuda::plain {

std::string refusal(const AttentionConfig& config);
planner::TileShape tile(const AttentionConfig& config);
DType weights(const AttentionConfig& config);

}  // namespace folio::inline v0::kernels::cuda::plain
