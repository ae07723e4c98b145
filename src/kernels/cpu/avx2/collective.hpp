#pragma once

#include "kernels/cpu/common/config.hpp"

namespace folio::inline v0::kernels::avx2 {

/// For x86-64-v3: AVX2, FMA, F16C.
extern const cpu::Collective kCollective;

}  // namespace folio::inline v0::kernels::avx2
