#pragma once

#include <cstdint>

#include "kernels/cpu/avx512/attention/fp8_tables.hpp"
#include "kernels/cpu/common/attention/convert.hpp"

/// Stored keys and values to registers of floats, exactly, in as few operations as their order allows: a bfloat16 is
/// the upper half of its float, so a register of them is two registers of floats after one shift and one mask.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

FOLIO_INLINE constexpr bool is_fp8_type(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

/// What a conversion keeps in registers.
template <DType kType, bool kTable = is_fp8_type(kType)>
struct Converter {};
template <DType kType>
struct Converter<kType, true> {
  Fp8Lookup lookup = Fp8Lookup::of<kType>();
};

/// The even and the odd words of 32 bfloat16 as floats.
FOLIO_INLINE __m512 even_words(__m512i words) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
FOLIO_INLINE __m512 odd_words(__m512i words) {
  return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)));
}

FOLIO_INLINE __m512 widen_lower_halves(__m512i halves) {
  return _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
}
FOLIO_INLINE __m512 widen_upper_halves(__m512i halves) {
  return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

/// `bytes` of 64 from `from` on, then zeros. Nothing beyond them is read.
FOLIO_INLINE __m512i load_bytes(const unsigned char* from, int32_t bytes) {
  if (bytes >= 64) return _mm512_loadu_si512(from);
  if (bytes <= 0) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - bytes), from);
}

/// A key is read in chunks of a whole number of cache lines.
template <DType kType>
inline constexpr int kKeyVecs = is_fp8_type(kType) ? 4 : 2;
template <DType kType>
inline constexpr int kKeyDims = kKeyVecs<kType>* kLanes;

/// The component of the chunk that stands in lane `lane` of register `vec` of what load_key gives.
template <DType kType>
FOLIO_INLINE constexpr int key_component(int vec, int lane) {
  if constexpr (kType == DType::kBFloat16) return 2 * lane + vec;
  if constexpr (is_fp8_type(kType)) return lane / 4 * 16 + vec / 2 * 8 + lane % 4 * 2 + vec % 2;
  return vec * kLanes + lane;
}

/// One chunk of a key; with kPart only its first `count` components are read, and the others are 0.
template <DType kType, bool kPart>
FOLIO_INLINE void load_key(const Converter<kType>& converter, const unsigned char* from, int32_t count, __m512* vecs) {
  const int32_t bytes = kPart ? count * static_cast<int32_t>(element_bytes(kType)) : 128;
  const __m512i line = load_bytes(from, bytes);
  if constexpr (kType == DType::kFloat32) {
    vecs[0] = _mm512_castsi512_ps(line);
    vecs[1] = _mm512_castsi512_ps(load_bytes(from + 64, bytes - 64));
  } else if constexpr (kType == DType::kFloat16) {
    vecs[0] = widen_lower_halves(line);
    vecs[1] = widen_upper_halves(line);
  } else if constexpr (kType == DType::kBFloat16) {
    vecs[0] = even_words(line);
    vecs[1] = odd_words(line);
  } else {
    __m512i lower, upper;
    converter.lookup.split(line, lower, upper);
    const __m512i first = _mm512_unpacklo_epi8(lower, upper);
    const __m512i second = _mm512_unpackhi_epi8(lower, upper);
    vecs[0] = even_words(first);
    vecs[1] = odd_words(first);
    vecs[2] = even_words(second);
    vecs[3] = odd_words(second);
  }
}

/// Values are read in units of 32 components, and come in their order.
inline constexpr int kUnitVecs = 2;
inline constexpr int kUnitDims = kUnitVecs * kLanes;

/// Where bytes or words of a line go so that conversions leave components in order.
struct alignas(64) LineOrder {
  uint8_t doubled_codes[64];  ///< of 32 codes: 0, 0, 16, 16, 1, 1, 17, 17, ...
  uint8_t paired_codes[64];   ///< of 32 pairs of codes: such that unpacking gives components 0 to 15 and 16 to 31
  uint16_t halves[32];        ///< of 32 words: 0, 16, 1, 17, ...
  uint16_t split_halves[32];  ///< of 16 pairs of words: 0, 2, 4, ..., 1, 3, 5, ...
};

consteval LineOrder make_line_order() {
  LineOrder order{};
  for (int i = 0; i < 32; ++i) {
    const int component = i / 2 + i % 2 * 16;
    order.halves[i] = static_cast<uint16_t>(component);
    order.split_halves[i] = static_cast<uint16_t>(i < 16 ? 2 * i : 2 * i - 31);
    order.doubled_codes[2 * i] = order.doubled_codes[2 * i + 1] = static_cast<uint8_t>(component);
    // Unpacking takes the lower 8 bytes of every 16 into the first register: pair i stands in quarter i / 4 % 4.
    const int to = i % 16 / 4 * 16 + i / 16 * 8 + i % 4 * 2;
    order.paired_codes[to] = static_cast<uint8_t>(2 * i);
    order.paired_codes[to + 1] = static_cast<uint8_t>(2 * i + 1);
  }
  return order;
}
static constexpr LineOrder kLineOrder = make_line_order();

/// One unit of one token's values.
template <DType kType, bool kPart>
FOLIO_INLINE void load_values(const Converter<kType>& converter, const unsigned char* from, int32_t count,
                              __m512* vecs) {
  if constexpr (is_fp8_type(kType)) {
    const __m256i line = _mm512_castsi512_si256(load_bytes(from, kPart ? count : 32));
    const __m512i codes =
        _mm512_permutexvar_epi8(_mm512_load_si512(kLineOrder.doubled_codes), _mm512_castsi256_si512(line));
    const __m512i words = converter.lookup.doubled(codes);
    vecs[0] = even_words(words);
    vecs[1] = odd_words(words);
  } else if constexpr (kType == DType::kBFloat16) {
    const __m512i line = load_bytes(from, kPart ? 2 * count : 64);
    const __m512i words = _mm512_permutexvar_epi16(_mm512_load_si512(kLineOrder.halves), line);
    vecs[0] = even_words(words);
    vecs[1] = odd_words(words);
  } else {
    load_key<kType, kPart>(converter, from, count, vecs);
  }
}

/// One unit of the values of a pair of tokens.
template <DType kType, bool kPart>
FOLIO_INLINE void load_value_pairs(const Converter<kType>& converter, const unsigned char* from, int32_t count,
                                   __m512* even, __m512* odd) {
  if constexpr (is_fp8_type(kType)) {
    const __m512i line = load_bytes(from, kPart ? 2 * count : 64);
    const __m512i codes = _mm512_permutexvar_epi8(_mm512_load_si512(kLineOrder.paired_codes), line);
    __m512i lower, upper;
    converter.lookup.split(codes, lower, upper);
    const __m512i first = _mm512_unpacklo_epi8(lower, upper);
    const __m512i second = _mm512_unpackhi_epi8(lower, upper);
    even[0] = even_words(first);
    odd[0] = odd_words(first);
    even[1] = even_words(second);
    odd[1] = odd_words(second);
  } else {
#pragma GCC unroll 2
    for (int c = 0; c < kUnitVecs; ++c) {
      const __m512i line = load_bytes(from + 64 * c, kPart ? 4 * count - 64 * c : 64);
      if constexpr (kType == DType::kBFloat16) {
        even[c] = even_words(line);
        odd[c] = odd_words(line);
      } else {
        const __m512i halves = _mm512_permutexvar_epi16(_mm512_load_si512(kLineOrder.split_halves), line);
        even[c] = widen_lower_halves(halves);
        odd[c] = widen_upper_halves(halves);
      }
    }
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
