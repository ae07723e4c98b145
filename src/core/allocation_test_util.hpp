#pragma once

#include <cstdint>

namespace folio::inline v0::backends::testing {

/// How often any operator new has been called in this program, which links the counting ones of
/// core/allocation_test_util.cc.
int64_t num_allocations();

}  // namespace folio::inline v0::backends::testing
