#pragma once

#include "kernels/cpu/common/attention/item_call.hpp"

namespace folio::inline v0::kernels::generic {

/// The same arithmetic for the instruction sets that this build knows.
extern const cpu::Arithmetic
    kBaselineArithmetic;                     ///< whatever the compiler targets without flags: x86-64, armv8-a, ...
extern const cpu::Arithmetic kV3Arithmetic;  ///< x86-64-v3; x86 only
extern const cpu::Arithmetic kV4Arithmetic;  ///< x86-64-v4; x86 only

}  // namespace folio::inline v0::kernels::generic
