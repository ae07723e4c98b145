#pragma once

#include "attention/op_state.hpp"
#include "folio/attention.hpp"
#include "kvcache/strided_set.hpp"

/// What a call writes lies apart from what it reads.
namespace folio::inline v0::attention {

/// A tensor [tokens, heads, dim] with a contiguous innermost dimension; strides may be negative.
kvcache::StridedSet tensor_set(const char* name, const ConstTensorView& tensor);

/// The block scales of rows [0, first_row + tokens) of a matrix with `blocks` a row.
kvcache::StridedSet block_scale_set(const BlockScaleArgs& scales, int64_t tokens, int64_t blocks);

/// Throws kInvalidArgument unless out, lse, block scales and `workspace` (the bytes that the plan needs) lie apart from
/// one another and from every input. Rows of one fused buffer may alternate. O(segments), from addresses and strides
/// alone; shapes have been checked.
void check_outputs_apart(const detail::PlanBufferState& plan, const AttentionArgs& args, const Workspace& workspace);

}  // namespace folio::inline v0::attention
