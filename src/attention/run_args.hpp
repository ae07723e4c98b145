#pragma once

#include "attention/op_state.hpp"
#include "folio/types/attention.hpp"

namespace folio::inline v0::attention {

/// Checks one layer's arguments against the op and the plan: shapes, strides, dtypes, features, table and indptr
/// lengths (O(requests)); not page ids. Throws kInvalidArgument, naming the field, the request and what was expected.
void check_args(const detail::PlanBufferState& plan, const AttentionArgs& args);

}  // namespace folio::inline v0::attention
