#pragma once

#include "folio/types/attention.hpp"

namespace folio::inline v0::attention {

/// Fills in the dtypes left at kUnset and checks what no kernel could make sense of: enum values, head counts, page
/// size, windows. Throws kInvalidArgument.
AttentionConfig resolve(const AttentionConfig& config);

}  // namespace folio::inline v0::attention
