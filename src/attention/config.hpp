#pragma once

#include "folio/types/attention.hpp"

namespace folio::inline v0::attention {

/// Fills in the dtypes left at kUnset and checks what no kernel could make sense of: enum values, head counts, page
/// size, windows. Throws kInvalidArgument; kUnsupported for packed pages
/// of a size or dtype that the format does not have.
AttentionConfig resolve(const AttentionConfig& config);

}  // namespace folio::inline v0::attention
