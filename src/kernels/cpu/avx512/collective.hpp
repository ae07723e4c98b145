#pragma once

#include "kernels/cpu/common/config.hpp"

namespace folio::inline v0::kernels::avx512 {

/// For AVX-512 F, BW, CD, DQ, VL (x86-64-v4) and VBMI.
extern const cpu::Collective kCollective;
/// The same with AVX512_BF16: both GEMMs of bfloat16 and fp8 data by VDPBF16PS, with P rounded to bfloat16.
extern const cpu::Collective kBf16Collective;

}  // namespace folio::inline v0::kernels::avx512
