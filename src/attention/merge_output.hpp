#pragma once

#include "folio/context.hpp"
#include "folio/merge.hpp"

namespace folio::inline v0::attention {

/// Throws kInvalidArgument for outputs that a merge of `function` could not write: what merge_states throws, for
/// callers that merge by a kernel of their own.
void check_merge_output(const char* function, const Context& context, const TensorView& out, const LseView& lse,
                        const Scale& out_scale);

}  // namespace folio::inline v0::attention
