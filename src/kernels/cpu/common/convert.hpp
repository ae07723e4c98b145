#pragma once

#include "folio/types/dtype.hpp"
#include "kernels/cpu/common/vec.hpp"

/// Upcasts stored elements to registers of floats. Exact, and without denormal floats on the way: the caller's
/// flush-to-zero modes change nothing.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

FOLIO_INLINE Vec upcast_bfloat16(HalfVec stored) {
  return from_bits(upper_halves(stored));
}

FOLIO_INLINE Vec upcast_float16(HalfVec stored) {
#if FOLIO_VEC_LANES == 16
  return _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(stored));  // masked: see max_or_second
#elif FOLIO_VEC_LANES == 8
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(stored));
#elif defined(FOLIO_VEC_NEON)
  return vcvt_f32_f16(reinterpret_cast<float16x4_t>(stored));  // never flushes: FPCR.FZ16 is not for conversions
#else
  const IntVec code = zero_extend_halves(stored);
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

/// The upper byte of each half is an e4m3 value, the lower one 0. Under float16's exponent a magnitude is the value
/// times 2^-8; the only NaN magnitude, 127, is the only one that carries into the exponent's top bit when 1 is added,
/// and with that bit it is a float16 NaN.
FOLIO_INLINE Vec upcast_shifted_e4m3(HalfVec stored) {
  const HalfVec sign = stored & 0x8000;
  const HalfVec magnitude = (stored >> 1) & 0x3f80;
  const HalfVec nan = (magnitude + 0x80) & 0x4000;
  return upcast_float16(sign | magnitude | nan) * splat(256.0f);
}

FOLIO_INLINE Vec upcast_fp8_e4m3(ByteVec stored) {
  return upcast_shifted_e4m3(upper_bytes(stored));
}

FOLIO_INLINE Vec upcast_fp8_e5m2(ByteVec stored) {
  return upcast_float16(upper_bytes(stored));
}

FOLIO_INLINE Vec upcast_int8(ByteVec stored) {
  return to_float(sign_extend_bytes(stored));
}

/// Bytes of one element.
FOLIO_INLINE constexpr int64_t element_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 1;
}

FOLIO_INLINE constexpr bool is_fp8_type(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

/// kLanes elements from `data` on.
template <DType kType>
FOLIO_INLINE Vec load_elements(const unsigned char* data) {
  if constexpr (kType == DType::kFloat32) return load<Vec>(data);
  if constexpr (kType == DType::kFloat16) return upcast_float16(load<HalfVec>(data));
  if constexpr (kType == DType::kBFloat16) return upcast_bfloat16(load<HalfVec>(data));
  if constexpr (kType == DType::kFloat8E4M3) return upcast_fp8_e4m3(load<ByteVec>(data));
  if constexpr (kType == DType::kFloat8E5M2) return upcast_fp8_e5m2(load<ByteVec>(data));
  if constexpr (kType == DType::kInt8) return upcast_int8(load<ByteVec>(data));
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
    return upcast_float16(low_halves(kOdd == 0 ? words : words >> 16));
  } else if constexpr (kType == DType::kInt8) {
    const IntVec words = upper_halves(load<HalfVec>(data));
    return to_float((kOdd == 0 ? words << 8 : words) >> 24);
  } else {
    const HalfVec words = load<HalfVec>(data);
    const HalfVec shifted = kOdd == 0 ? words << 8 : words & 0xff00;
    return kType == DType::kFloat8E4M3 ? upcast_shifted_e4m3(shifted) : upcast_float16(shifted);
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

#if defined(__AVX512VBMI__)

struct alignas(64) Fp8Table {
  uint8_t low[128];
  uint8_t high[128];
};

/// `mantissa_bits` of the 7 are the mantissa's. With `infinity`, the largest exponent is IEEE's; without, only the
/// largest code is NaN.
consteval Fp8Table make_fp8_table(int mantissa_bits, bool infinity) {
  Fp8Table table{};
  const int exponent_bits = 7 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int one = 1 << mantissa_bits;
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> mantissa_bits;
    int mantissa = code & (one - 1);
    int bits = 0;
    const bool largest = exponent == (1 << exponent_bits) - 1;
    if (infinity ? largest && mantissa != 0 : code == 127) {
      bits = 0x7fc0;
    } else if (infinity && largest) {
      bits = 0x7f80;
    } else if (code != 0) {
      if (exponent == 0) {  // subnormal: its leading bit becomes the implicit one
        exponent = 1;
        for (; mantissa < one; mantissa *= 2) --exponent;
        mantissa -= one;
      }
      bits = (exponent - bias + 127) << 7 | mantissa << (7 - mantissa_bits);
    }
    table.low[code] = static_cast<uint8_t>(bits & 0xff);
    table.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}

static constexpr Fp8Table kE4M3Table = make_fp8_table(3, false);
static constexpr Fp8Table kE5M2Table = make_fp8_table(2, true);

/// The table of a type, in registers.
struct Fp8Lookup {
  __m512i low[2];
  __m512i high[2];

  template <DType kType>
  FOLIO_INLINE_MEMBER static Fp8Lookup of() {
    const Fp8Table& table = kType == DType::kFloat8E4M3 ? kE4M3Table : kE5M2Table;
    return {{_mm512_load_si512(table.low), _mm512_load_si512(table.low + 64)},
            {_mm512_load_si512(table.high), _mm512_load_si512(table.high + 64)}};
  }
  /// 64 fp8 values as bfloat16: of every 16, the lower 8 in `first`, the upper 8 in `second`. Lookups ignore the sign
  /// bit.
  FOLIO_INLINE_MEMBER void upcast(__m512i fp8, __m512i& first, __m512i& second) const {
    const __m512i lower = _mm512_permutex2var_epi8(low[0], fp8, low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], fp8, high[1]);
    const __m512i upper = with_sign(magnitude, fp8, _mm512_set1_epi8(-128));
    first = _mm512_unpacklo_epi8(lower, upper);
    second = _mm512_unpackhi_epi8(lower, upper);
  }
  /// 32 fp8 values, each in both bytes of a word, as bfloat16.
  FOLIO_INLINE_MEMBER __m512i upcast_doubled(__m512i fp8) const {
    const __m512i lower = _mm512_mask2_permutex2var_epi8(low[0], fp8, 0x5555555555555555, low[1]);
    const __m512i both = _mm512_mask2_permutex2var_epi8(high[0], lower, 0xaaaaaaaaaaaaaaaa, high[1]);
    return with_sign(both, fp8, _mm512_set1_epi16(INT16_MIN));
  }

 private:
  FOLIO_INLINE_MEMBER static __m512i with_sign(__m512i magnitude, __m512i fp8, __m512i sign) {
    return _mm512_ternarylogic_epi32(magnitude, fp8, sign, 0xf8);  // a | (b & c)
  }
};

#endif  // __AVX512VBMI__

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
