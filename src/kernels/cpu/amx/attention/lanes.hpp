#pragma once

#include "kernels/cpu/common/attention/math.hpp"

/// Vectors with a row of queries in each lane, and what turns them into rows.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

static_assert(kLanes == 16, "a tile has 16 rows");

/// 2^x for x <= 128, 0 in lanes that `lanes` leaves out: relative error below 2^-22.5, exactly 1 at 0, exactly 0 below
/// -126.5; NaN stays. As exp2_nonpositive (math.hpp), with a polynomial of degree 5 (2^-23.3 before rounding, fitted in
/// the same way), and the exponent's bias added with the constant that rounds.
FOLIO_INLINE Vec exp2_of_lanes(Vec x, __mmask16 lanes) {
  x = max_or_second(splat(-127.0f), x);
  const Vec magic = splat(12582912.0f + 127.0f);
  const Vec shifted = x + magic;
  const Vec fraction = x - (shifted - magic);
  Vec y = splat(0x1.5bba14p-10f);
  y = multiply_add(y, fraction, splat(0x1.3cea88p-7f));
  y = multiply_add(y, fraction, splat(0x1.c6b752p-5f));
  y = multiply_add(y, fraction, splat(0x1.ebf9bcp-3f));
  y = multiply_add(y, fraction, splat(0x1.62e42ap-1f));
  y = multiply_add(y, fraction, splat(1.0f));
  return _mm512_maskz_mul_ps(lanes, y, from_bits(bits(shifted) << 23));
}

/// Lanes that wrap around: bits of a NaN do, in sums that count on nothing of it.
FOLIO_INLINE IntVec wrapping_sum(IntVec a, IntVec b) {
  return reinterpret_cast<IntVec>(_mm512_add_epi32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

/// Both vectors rounded to bfloat16, ties upwards: `even` in the low halves of the lanes, `odd` in the high ones. A NaN
/// stays one unless the low half of its bits carries: callers have none such.
FOLIO_INLINE IntVec pack_bfloat16(Vec even, Vec odd) {
  const IntVec half = splat_int(0x8000);
  const IntVec low = reinterpret_cast<IntVec>(
      _mm512_maskz_srli_epi32(0xffff, reinterpret_cast<__m512i>(wrapping_sum(bits(even), half)), 16));
  return low | (wrapping_sum(bits(odd), half) & splat_int(-65536));
}

/// Arithmetic::store_row for bfloat16, rounded to nearest even, and float32.
static bool store_row_of_lanes(const float* acc, float factor, DType dtype, int32_t n, void* to) noexcept {
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat32) return false;
  auto* const out = static_cast<unsigned char*>(to);
  for (int32_t d = 0; d < n; d += kLanes) {
    const auto lanes = static_cast<__mmask16>(n - d < kLanes ? 0xff : 0xffff);  // n is a multiple of 8
    const Vec value = _mm512_maskz_loadu_ps(lanes, acc + d) * splat(factor) + Vec{};
    if (dtype == DType::kFloat32) {
      _mm512_mask_storeu_ps(out + 4 * d, lanes, value);
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

/// out[i] lane j = in[j] lane i.
FOLIO_INLINE void transpose(IntVec* r) {
  IntVec t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = FOLIO_SHUFFLE(r[2 * i], r[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[2 * i + 1] = FOLIO_SHUFFLE(r[2 * i], r[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const IntVec* const a = t + 4 * i;
    r[4 * i] = FOLIO_SHUFFLE(a[0], a[2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    r[4 * i + 1] = FOLIO_SHUFFLE(a[0], a[2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    r[4 * i + 2] = FOLIO_SHUFFLE(a[1], a[3], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    r[4 * i + 3] = FOLIO_SHUFFLE(a[1], a[3], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = FOLIO_SHUFFLE(r[i], r[4 + i], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[4 + i] = FOLIO_SHUFFLE(r[i], r[4 + i], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    t[8 + i] = FOLIO_SHUFFLE(r[8 + i], r[12 + i], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[12 + i] = FOLIO_SHUFFLE(r[8 + i], r[12 + i], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = FOLIO_SHUFFLE(t[i], t[8 + i], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    r[8 + i] = FOLIO_SHUFFLE(t[i], t[8 + i], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    r[4 + i] = FOLIO_SHUFFLE(t[4 + i], t[12 + i], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    r[12 + i] = FOLIO_SHUFFLE(t[4 + i], t[12 + i], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
