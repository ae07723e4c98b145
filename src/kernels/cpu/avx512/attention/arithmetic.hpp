#pragma once

#include "kernels/cpu/common/attention/item_call.hpp"

namespace folio::inline v0::kernels::avx512 {

/// For AVX-512 F, BW, CD, DQ, VL (x86-64-v4) and VBMI.
extern const cpu::Arithmetic kArithmetic;
/// With BF16 besides.
extern const cpu::Arithmetic kBf16Arithmetic;

}  // namespace folio::inline v0::kernels::avx512
