#pragma once

#include "kernels/cpu/common/attention/vec.hpp"

namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// 2^x for x <= 0: relative error below 2^-22.9, exactly 1 at 0, exactly 0 below -126.5 and at -infinity; NaN stays.
/// x = n + f with n the nearest integer; 2^f by a polynomial of degree 6 with constant term 1, its other coefficients
/// fitted over [-1/2, 1/2] for the least largest relative error (Lawson's weighted least squares; 2^-28.9 before
/// rounding); 2^n by its exponent bits.
FOLIO_INLINE Vec exp2_nonpositive(Vec x) {
  x = max_or_second(splat(-127.0f), x);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: a float near it has its integer in the low bits
  const Vec shifted = x + magic;
  const Vec fraction = x - (shifted - magic);
  Vec y = splat(0x1.41fbbcp-13f);
  y = multiply_add(y, fraction, splat(0x1.5f3e54p-10f));
  y = multiply_add(y, fraction, splat(0x1.3b2d4cp-7f));
  y = multiply_add(y, fraction, splat(0x1.c6aee8p-5f));
  y = multiply_add(y, fraction, splat(0x1.ebfbdcp-3f));
  y = multiply_add(y, fraction, splat(0x1.62e430p-1f));
  y = multiply_add(y, fraction, splat(1.0f));
  return y * from_bits((bits(shifted) + splat_int(127)) << 23);  // -127 gives the bits of 0
}

FOLIO_INLINE float exp2_nonpositive(float x) {
  return exp2_nonpositive(splat(x))[0];
}

/// tanh(x): relative error below 2^-21; NaN stays. Up to 0.55 an odd polynomial, fitted like that of exp2
/// (2^-29.8 before rounding); beyond, 1 - 2 / (e^(2|x|) + 1), written with the exponential of -2|x|.
FOLIO_INLINE Vec tanh(Vec x) {
  const IntVec sign = bits(x) & splat_int(INT32_MIN);
  const Vec magnitude = from_bits(bits(x) ^ sign);
  const Vec square = x * x;
  Vec y = splat(-6.2742382e-3f);
  y = multiply_add(y, square, splat(2.1071678e-2f));
  y = multiply_add(y, square, splat(-5.3852309e-2f));
  y = multiply_add(y, square, splat(1.3332586e-1f));
  y = multiply_add(y, square, splat(-3.3333316e-1f));
  const Vec near = multiply_add(y * square, x, x);
  const Vec decay = exp2_nonpositive(magnitude * splat(-2.0f * kLog2E));
  const Vec far = (splat(1.0f) - decay) / (splat(1.0f) + decay);
  return select(magnitude < splat(0.55f), near, from_bits(bits(far) | sign));
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
