#pragma once

#include <string>

#include "backends/token_pool/device/list_report.hpp"

namespace folio::inline v0::backends::token_pool {

/// What was found, in words.
std::string describe(const ListReport& report);

/// Throws kInvalidArgument if the device has written a fault, and forgets it: it is told once.
void throw_fault(ListReport& report);

}  // namespace folio::inline v0::backends::token_pool
