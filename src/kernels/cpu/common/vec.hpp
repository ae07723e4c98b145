#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/common/config.hpp"

#ifndef FOLIO_ISA
#error \
    "FOLIO_ISA must name the instruction set's namespace; only arithmetic compiled for one instruction set includes this"
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define FOLIO_VEC_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FOLIO_VEC_LANES 8
#else
#define FOLIO_VEC_LANES 4
#if defined(__aarch64__) && defined(__ARM_NEON) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define FOLIO_VEC_NEON
#endif
#endif
#if FOLIO_VEC_LANES > 4
#include <immintrin.h>
#elif defined(FOLIO_VEC_NEON)
#include <arm_neon.h>
#endif

/// Every function of an instruction set is forced inline or static: no copy of it becomes a symbol that another object
/// could pick up.
#define FOLIO_INLINE static inline __attribute__((always_inline))
#define FOLIO_INLINE_MEMBER inline __attribute__((always_inline))

#if defined(__clang__)
#define FOLIO_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FOLIO_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

/// A register of floats, as wide as the instruction set has, through the compilers' vector extensions.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

inline constexpr int kLanes = FOLIO_VEC_LANES;
/// Registers that the instruction set has: what a block of a GEMM may hold.
#if FOLIO_VEC_LANES == 16 || defined(FOLIO_VEC_NEON)
inline constexpr int kVecRegisters = 32;
#else
inline constexpr int kVecRegisters = 16;
#endif
using Vec = float __attribute__((vector_size(4 * FOLIO_VEC_LANES)));
using IntVec = int32_t __attribute__((vector_size(4 * FOLIO_VEC_LANES)));
using HalfVec = uint16_t __attribute__((vector_size(2 * FOLIO_VEC_LANES)));
using ByteVec = uint8_t __attribute__((vector_size(FOLIO_VEC_LANES)));
using Bf16Vec = uint16_t __attribute__((vector_size(4 * FOLIO_VEC_LANES)));  ///< bfloat16 as stored
using Quad = float __attribute__((vector_size(16)));

template <typename Result>
FOLIO_INLINE Result load(const void* from) {
  Result value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

template <typename Value>
FOLIO_INLINE void store(void* to, Value value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

FOLIO_INLINE Vec splat(float value) {
  return value - Vec{};  // not "Vec{} + value", which would turn -0 into +0
}
FOLIO_INLINE IntVec splat_int(int32_t value) {
  return value - IntVec{};
}
FOLIO_INLINE IntVec bits(Vec value) {
  return reinterpret_cast<IntVec>(value);
}
FOLIO_INLINE Vec from_bits(IntVec value) {
  return reinterpret_cast<Vec>(value);
}

/// Integers to wider and narrower ones. Written out where compilers take the long way (gcc 12 halves wide vectors).
FOLIO_INLINE IntVec zero_extend_halves(HalfVec value) {
#if FOLIO_VEC_LANES == 16
  return reinterpret_cast<IntVec>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(value)));
#elif FOLIO_VEC_LANES == 8
  return reinterpret_cast<IntVec>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(value)));
#elif defined(FOLIO_VEC_NEON)
  return reinterpret_cast<IntVec>(vmovl_u16(value));
#else
  return __builtin_convertvector(value, IntVec);
#endif
}

FOLIO_INLINE HalfVec zero_extend_bytes(ByteVec value) {
#if FOLIO_VEC_LANES == 16
  return reinterpret_cast<HalfVec>(_mm256_cvtepu8_epi16(reinterpret_cast<__m128i>(value)));
#elif FOLIO_VEC_LANES == 8
  return reinterpret_cast<HalfVec>(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(reinterpret_cast<int64_t>(value))));
#else
  return __builtin_convertvector(value, HalfVec);
#endif
}

/// Each byte as a signed number.
FOLIO_INLINE IntVec sign_extend_bytes(ByteVec value) {
#if FOLIO_VEC_LANES == 16
  return reinterpret_cast<IntVec>(_mm512_maskz_cvtepi8_epi32(0xffff, reinterpret_cast<__m128i>(value)));
#elif FOLIO_VEC_LANES == 8
  return reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(reinterpret_cast<int64_t>(value))));
#elif defined(FOLIO_VEC_NEON)
  const uint32x2_t word{reinterpret_cast<uint32_t>(value), 0};
  return reinterpret_cast<IntVec>(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(word)))));
#else
  return (zero_extend_halves(zero_extend_bytes(value)) << 24) >> 24;
#endif
}

FOLIO_INLINE Vec to_float(IntVec value) {
#if FOLIO_VEC_LANES == 16
  return _mm512_maskz_cvtepi32_ps(0xffff, reinterpret_cast<__m512i>(value));
#else
  return __builtin_convertvector(value, Vec);
#endif
}

/// Each half in the upper half of a lane, and each byte in the upper byte of a half, above zeros.
FOLIO_INLINE IntVec upper_halves(HalfVec value) {
#if defined(FOLIO_VEC_NEON)
  return reinterpret_cast<IntVec>(vshll_n_u16(value, 16));
#else
  return zero_extend_halves(value) << 16;
#endif
}

FOLIO_INLINE HalfVec upper_bytes(ByteVec value) {
#if defined(FOLIO_VEC_NEON)
  const uint32x2_t word{reinterpret_cast<uint32_t>(value), 0};
  return vget_low_u16(vshll_n_u8(vreinterpret_u8_u32(word), 8));
#else
  return zero_extend_bytes(value) << 8;
#endif
}

/// The low halves of the lanes.
FOLIO_INLINE HalfVec low_halves(IntVec value) {
#if FOLIO_VEC_LANES == 16
  return reinterpret_cast<HalfVec>(_mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(value)));
#elif defined(FOLIO_VEC_NEON)
  return vmovn_u32(reinterpret_cast<uint32x4_t>(value));
#else
  return __builtin_convertvector(value & 0xffff, HalfVec);
#endif
}

/// a * b + c, rounded once where the instruction set has that and twice where not: the same everywhere in one object,
/// which is compiled with -ffp-contract=off.
FOLIO_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if FOLIO_VEC_LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#elif FOLIO_VEC_LANES == 8
  return _mm256_fmadd_ps(a, b, c);
#elif defined(FOLIO_VEC_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

#if defined(FOLIO_VEC_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FOLIO_VEC_BFMMLA
/// c + a b^T by BFMMLA: a and b are blocks of 2 rows of 4 bfloat16, c of 2 x 2 floats. Each sum takes its four products
/// two by two: products are exact, the sum of two and then its sum with c are rounded to odd, denormals are taken as 0
/// and flushed to 0 (unless FPCR.EBF is set).
FOLIO_INLINE Vec multiply_add_2x2(Bf16Vec a, Bf16Vec b, Vec c) {
  return vbfmmlaq_f32(c, reinterpret_cast<bfloat16x8_t>(a), reinterpret_cast<bfloat16x8_t>(b));
}
#endif

/// The larger; `b` where either is NaN.
FOLIO_INLINE Vec max_or_second(Vec a, Vec b) {
#if FOLIO_VEC_LANES == 16
  return _mm512_maskz_max_ps(0xffff, a, b);  // the unmasked form warns of uninitialized registers (gcc bug 105593)
#elif FOLIO_VEC_LANES == 8
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;  // on AArch64 FCMGT and BSL: FMAX returns the NaN, FMAXNM the number
#endif
}

/// Where the mask is all ones, a; where it is 0, b.
FOLIO_INLINE Vec select(IntVec mask, Vec a, Vec b) {
#if defined(FOLIO_VEC_NEON)
  return vbslq_f32(reinterpret_cast<uint32x4_t>(mask), a, b);
#else
  return from_bits((mask & bits(a)) | (~mask & bits(b)));
#endif
}

FOLIO_INLINE IntVec lane_numbers() {
#if FOLIO_VEC_LANES == 16
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif FOLIO_VEC_LANES == 8
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return IntVec{0, 1, 2, 3};
#endif
}

/// All ones in lane i where bit i of `word` is set.
FOLIO_INLINE IntVec lanes_of_bits(uint32_t word) {
  const IntVec bit = splat_int(1) << lane_numbers();
  return (splat_int(static_cast<int32_t>(word)) & bit) != 0;
}

/// kLanes / 4 rows of four sums each: out[4 * i + j] = the sum of the lanes of v[(kLanes / 4) * j + i]. Lanes are added
/// in one order, whatever the position in v: halves, quarters and so on; on AArch64, whose FADDP adds neighbours,
/// neighbours and then their sums.
FOLIO_INLINE Vec sum_lanes(const Vec* v) {
#if FOLIO_VEC_LANES == 16
  Vec eights[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Vec a = v[2 * i];
    const Vec b = v[2 * i + 1];
    eights[i] = FOLIO_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                FOLIO_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  Vec fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec a = eights[2 * i];
    const Vec b = eights[2 * i + 1];
    fours[i] = FOLIO_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               FOLIO_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  Vec twos[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Vec a = fours[2 * i];
    const Vec b = fours[2 * i + 1];
    twos[i] = FOLIO_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
              FOLIO_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  return FOLIO_SHUFFLE(twos[0], twos[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         FOLIO_SHUFFLE(twos[0], twos[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif FOLIO_VEC_LANES == 8
  Vec fours[4];  // one of two shuffles is a blend: shuffles want ports that multiply-adds want
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec a = v[2 * i];
    const Vec b = v[2 * i + 1];
    fours[i] = FOLIO_SHUFFLE(a, b, 0, 1, 2, 3, 12, 13, 14, 15) + FOLIO_SHUFFLE(a, b, 4, 5, 6, 7, 8, 9, 10, 11);
  }
  Vec twos[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Vec a = fours[2 * i];
    const Vec b = fours[2 * i + 1];
    twos[i] = FOLIO_SHUFFLE(a, b, 0, 1, 10, 11, 4, 5, 14, 15) + FOLIO_SHUFFLE(a, b, 2, 3, 8, 9, 6, 7, 12, 13);
  }
  return FOLIO_SHUFFLE(twos[0], twos[1], 0, 2, 8, 10, 4, 6, 12, 14) +
         FOLIO_SHUFFLE(twos[0], twos[1], 1, 3, 9, 11, 5, 7, 13, 15);
#elif defined(FOLIO_VEC_NEON)
  return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
#else
  const Vec low = FOLIO_SHUFFLE(v[0], v[1], 0, 1, 4, 5) + FOLIO_SHUFFLE(v[0], v[1], 2, 3, 6, 7);
  const Vec high = FOLIO_SHUFFLE(v[2], v[3], 0, 1, 4, 5) + FOLIO_SHUFFLE(v[2], v[3], 2, 3, 6, 7);
  return FOLIO_SHUFFLE(low, high, 0, 2, 4, 6) + FOLIO_SHUFFLE(low, high, 1, 3, 5, 7);
#endif
}

/// The sum of the lanes, in the order of sum_lanes.
FOLIO_INLINE float sum_of_lanes(Vec v) {
#if defined(FOLIO_VEC_NEON)
  return vaddvq_f32(v);
#else
#if FOLIO_VEC_LANES == 16
  v += FOLIO_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += FOLIO_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
  v += FOLIO_SHUFFLE(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1);
#elif FOLIO_VEC_LANES == 8
  v += FOLIO_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += FOLIO_SHUFFLE(v, v, 2, 3, 0, 1, 2, 3, 0, 1);
#else
  v += FOLIO_SHUFFLE(v, v, 2, 3, 0, 1);
#endif
  return v[0] + v[1];
#endif
}

/// The largest lane; no lane is NaN.
FOLIO_INLINE float max_of_lanes(Vec v) {
#if defined(FOLIO_VEC_NEON)
  return vmaxvq_f32(v);
#else
#if FOLIO_VEC_LANES == 16
  v = max_or_second(v, FOLIO_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max_or_second(v, FOLIO_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max_or_second(v, FOLIO_SHUFFLE(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
#elif FOLIO_VEC_LANES == 8
  v = max_or_second(v, FOLIO_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max_or_second(v, FOLIO_SHUFFLE(v, v, 2, 3, 0, 1, 2, 3, 0, 1));
#else
  v = max_or_second(v, FOLIO_SHUFFLE(v, v, 2, 3, 0, 1));
#endif
  return v[0] > v[1] ? v[0] : v[1];
#endif
}

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
