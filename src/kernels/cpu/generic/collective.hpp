#pragma once

#include "kernels/cpu/common/config.hpp"

namespace folio::inline v0::kernels::generic {

/// One source (mainloop.hpp), compiled once per instruction set.
extern const cpu::Collective
    kBaselineCollective;                       ///< whatever the compiler targets without flags: x86-64, armv8-a, ...
extern const cpu::Collective kV3Collective;    ///< x86-64-v3; x86 only
extern const cpu::Collective kV4Collective;    ///< x86-64-v4; x86 only
extern const cpu::Collective kBf16Collective;  ///< armv8.2-a with FEAT_BF16; AArch64 only

}  // namespace folio::inline v0::kernels::generic
