#pragma once

#include <cstdint>

/// src/ptx/registers.cuh, emulated: there are enough.
namespace folio::inline v0::ptx {

template <int32_t Count>
void lower_registers() {}
template <int32_t Count>
void raise_registers() {}

}  // namespace folio::inline v0::ptx
