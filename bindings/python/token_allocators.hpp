#pragma once

#include "array.hpp"

namespace folio::python {

/// Throws Error(kInvalidArgument) for a negative number of slots or rows.
void require_count(int64_t count);

/// TokenAllocator, WindowTokenAllocator, and the SlotChanges that they apply.
void bind_token_allocators(nb::module_& m);

}  // namespace folio::python
