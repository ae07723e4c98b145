#pragma once

#include "kernels/cpu/common/attention/item_call.hpp"

namespace folio::inline v0::kernels::amx {

/// Compiled for x86-64-v4 with AMX; to be called between the two functions below.
extern const cpu::Arithmetic kArithmetic;

/// Configures the calling thread's tile registers, and gives them up.
void configure_tiles() noexcept;
void release_tiles() noexcept;

}  // namespace folio::inline v0::kernels::amx
