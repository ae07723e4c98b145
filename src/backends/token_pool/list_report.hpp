#pragma once

#include "backends/token_pool/device/kv_lists_rule.hpp"

namespace folio::inline v0::backends::token_pool {

/// Throws kInvalidArgument if the device has written a fault, and forgets it: it is told once.
void throw_fault(ListReport& report);

}  // namespace folio::inline v0::backends::token_pool
