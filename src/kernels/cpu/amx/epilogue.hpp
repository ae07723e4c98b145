#pragma once

#include "kernels/cpu/amx/softmax.hpp"

/// The epilogue's store of a row; common/epilogue.cc does the rest.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Collective::store_row for float32, and for bfloat16 and float16 rounded to nearest even.
static bool store_row_amx(const float* acc, float factor, DType dtype, int32_t n, void* to) noexcept {
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat16 && dtype != DType::kFloat32) return false;
  auto* const out = static_cast<unsigned char*>(to);
  for (int32_t d = 0; d < n; d += kLanes) {
    const auto lanes = static_cast<__mmask16>(n - d < kLanes ? 0xff : 0xffff);  // n is a multiple of 8
    const Vec value = _mm512_maskz_loadu_ps(lanes, acc + d) * splat(factor) + Vec{};
    if (dtype == DType::kFloat32) {
      _mm512_mask_storeu_ps(out + 4 * d, lanes, value);
      continue;
    }
    if (dtype == DType::kFloat16) {
      _mm256_mask_storeu_epi16(out + 2 * d, lanes, _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT));
      continue;
    }
    const IntVec code = bits(value);
    IntVec rounded = wrapping_sum(code, splat_int(0x7fff) + ((code >> 16) & splat_int(1)));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = reinterpret_cast<IntVec>(_mm512_mask_mov_epi32(reinterpret_cast<__m512i>(rounded), nan,
                                                             reinterpret_cast<__m512i>(code | splat_int(0x400000))));
    _mm512_mask_cvtepi32_storeu_epi16(out + 2 * d, lanes, reinterpret_cast<__m512i>(rounded >> 16));
  }
  return true;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
