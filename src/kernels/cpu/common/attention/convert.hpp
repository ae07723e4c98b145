#pragma once

#include "folio/types/dtype.hpp"
#include "kernels/cpu/common/attention/vec.hpp"

/// Stored elements to registers of floats: exact, without denormal floats on the way, so that the caller's
/// flush-to-zero modes change nothing.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

FOLIO_INLINE Vec widen_bfloat16(HalfVec codes) {
  return from_bits(widen_halves(codes) << 16);
}

FOLIO_INLINE Vec widen_float16(HalfVec codes) {
#if FOLIO_VEC_LANES == 16
  return _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(codes));  // masked: see max_or_second
#elif FOLIO_VEC_LANES == 8
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(codes));
#else
  const IntVec code = widen_halves(codes);
  const IntVec magnitude = (code & 0x7fff) << 13;
  const IntVec rebias = splat_int((127 - 15) << 23);
  const IntVec one_exponent = splat_int(1 << 23);
  // A subnormal is its mantissa in units of 2^-24: under the exponent of 2^-14 it stands as an addend to 2^-14.
  const IntVec subnormal = bits(from_bits(magnitude + rebias + one_exponent) - from_bits(rebias + one_exponent));
  const IntVec is_subnormal = magnitude < one_exponent;
  const IntVec is_special = magnitude >= splat_int(31 << 23);
  IntVec value = (is_subnormal & subnormal) | (~is_subnormal & (magnitude + rebias));
  value = (is_special & (magnitude | splat_int(0x7f800000))) | (~is_special & value);
  return from_bits(value | ((code & 0x8000) << 16));
#endif
}

/// The upper byte of each half is an e4m3 code, the lower one 0. Under float16's exponent a magnitude is the value
/// times 2^-8; the only NaN magnitude, 127, is the only one that carries into the exponent's top bit when 1 is added,
/// and with that bit it is a float16 NaN.
FOLIO_INLINE Vec widen_shifted_e4m3(HalfVec codes) {
  const HalfVec sign = codes & 0x8000;
  const HalfVec magnitude = (codes >> 1) & 0x3f80;
  const HalfVec nan = (magnitude + 0x80) & 0x4000;
  return widen_float16(sign | magnitude | nan) * splat(256.0f);
}

FOLIO_INLINE Vec widen_fp8_e4m3(ByteVec codes) {
  return widen_shifted_e4m3(widen_bytes(codes) << 8);
}

FOLIO_INLINE Vec widen_fp8_e5m2(ByteVec codes) {
  return widen_float16(widen_bytes(codes) << 8);
}

/// Bytes of one element.
FOLIO_INLINE constexpr int64_t element_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 1;
}

/// kLanes elements from `data` on.
template <DType kType>
FOLIO_INLINE Vec load_elements(const unsigned char* data) {
  if constexpr (kType == DType::kFloat32) return load<Vec>(data);
  if constexpr (kType == DType::kFloat16) return widen_float16(load<HalfVec>(data));
  if constexpr (kType == DType::kBFloat16) return widen_bfloat16(load<HalfVec>(data));
  if constexpr (kType == DType::kFloat8E4M3) return widen_fp8_e4m3(load<ByteVec>(data));
  if constexpr (kType == DType::kFloat8E5M2) return widen_fp8_e5m2(load<ByteVec>(data));
}

/// `count` < kLanes elements, then zeros. Reads nothing beyond them.
template <DType kType>
FOLIO_INLINE Vec load_some(const unsigned char* data, int32_t count) {
  unsigned char padded[4 * kLanes] = {};
  __builtin_memcpy(padded, data, static_cast<size_t>(count * element_bytes(kType)));
  return load_elements<kType>(padded);
}

/// One token of kLanes pairs: element 2 * i + kOdd of `data` in lane i. For 16-bit types a pair is one 32-bit word.
template <DType kType, int kOdd>
FOLIO_INLINE Vec load_of_pairs(const unsigned char* data) {
  if constexpr (kType == DType::kBFloat16) {
    const IntVec words = load<IntVec>(data);
    return from_bits(kOdd == 0 ? words << 16 : words & splat_int(-65536));
  } else if constexpr (kType == DType::kFloat16) {
    const IntVec words = load<IntVec>(data);
    return widen_float16(low_halves(kOdd == 0 ? words : words >> 16));
  } else {
    const HalfVec words = load<HalfVec>(data);
    const HalfVec codes = kOdd == 0 ? words << 8 : words & 0xff00;
    return kType == DType::kFloat8E4M3 ? widen_shifted_e4m3(codes) : widen_float16(codes);
  }
}

template <DType kType, int kOdd>
FOLIO_INLINE Vec load_some_of_pairs(const unsigned char* data, int32_t count) {
  unsigned char padded[8 * kLanes] = {};
  __builtin_memcpy(padded, data, static_cast<size_t>(2 * count * element_bytes(kType)));
  return load_of_pairs<kType, kOdd>(padded);
}

/// A stored vector to floats, with zeros up to the padded dimension.
template <DType kType>
FOLIO_INLINE void convert_row(const unsigned char* from, int32_t dim, float* to) {
  int32_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load_elements<kType>(from + d * element_bytes(kType)));
  if (d < dim) {
    store(to + d, load_some<kType>(from + d * element_bytes(kType), dim - d));
    d += kLanes;
  }
  for (const int32_t end = (dim + kDimPadding - 1) / kDimPadding * kDimPadding; d < end; d += kLanes) {
    store(to + d, Vec{});
  }
}

template <DType kType, int kOdd>
FOLIO_INLINE void convert_row_of_pairs(const unsigned char* from, int32_t dim, float* to) {
  int32_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load_of_pairs<kType, kOdd>(from + 2 * d * element_bytes(kType)));
  if (d < dim) {
    store(to + d, load_some_of_pairs<kType, kOdd>(from + 2 * d * element_bytes(kType), dim - d));
    d += kLanes;
  }
  for (const int32_t end = (dim + kDimPadding - 1) / kDimPadding * kDimPadding; d < end; d += kLanes) {
    store(to + d, Vec{});
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
