#pragma once

#include <cstdint>

#include "kernels/cpu/common/producer.hpp"

/// Loads K and V and upcasts them exactly, in as few operations as their order allows: a bfloat16 is the upper half of
/// its float, so a register of them becomes two registers of floats by one shift and one mask.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Keeps a value in a register. Compilers would load it again for each instruction that uses it, and Zen 4 loads only
/// one register of 64 bytes a cycle.
template <typename Value>
FOLIO_INLINE Value in_register(Value value) {
  asm("" : "+v"(value));
  return value;
}

/// What upcasting keeps in registers.
template <DType kType, bool kTable = is_fp8_type(kType)>
struct Upcaster {};
template <DType kType>
struct Upcaster<kType, true> {
  Fp8Lookup lookup = Fp8Lookup::of<kType>();
};

/// The even and the odd words of 32 bfloat16 as floats.
FOLIO_INLINE __m512 even_words(__m512i words) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
FOLIO_INLINE __m512 odd_words(__m512i words) {
  return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)));
}

FOLIO_INLINE __m512 upcast_lower_float16(__m512i halves) {
  return _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
}
FOLIO_INLINE __m512 upcast_upper_float16(__m512i halves) {
  return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

/// `bytes` of 64 from `from` on, then zeros. Nothing beyond them is read.
FOLIO_INLINE __m512i load_bytes(const unsigned char* from, int32_t bytes) {
  if (bytes >= 64) return in_register(_mm512_loadu_si512(from));
  if (bytes <= 0) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - bytes), from);
}

/// `bytes` of 16 from `from` on, then zeros. Nothing beyond them is read.
FOLIO_INLINE __m128i load_sixteen(const unsigned char* from, int32_t bytes) {
  if (bytes >= 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if (bytes <= 0) return _mm_setzero_si128();
  return _mm_maskz_loadu_epi8(static_cast<__mmask16>(0xffff >> (16 - bytes)), from);
}

/// Sixteen int8 as the bits of floats.
FOLIO_INLINE __m512i upcast_int8_lanes(__m128i stored) {
  return _mm512_castps_si512(_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, stored)));
}

FOLIO_INLINE __m256i half_line(const unsigned char* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

/// A key is read in chunks of whole cache lines, as registers of floats or, for dot products of bfloat16 pairs (kDot),
/// of bfloat16.
template <DType kType>
inline constexpr int kKeyDims = is_fp8_type(kType) ? 64 : 32;
template <DType kType, bool kDot>
inline constexpr int kKeyVecs = kKeyDims<kType> / (kDot ? 2 * kLanes : kLanes);

/// The component of the chunk that load_key puts in place `i`, counted over its registers.
template <DType kType, bool kDot>
FOLIO_INLINE constexpr int key_component(int i) {
  if constexpr (is_fp8_type(kType)) {
    // Of upcast fp8, the lower 8 of every 16 are in the first line, the upper 8 in the second.
    const int word = kDot ? i % 32 : i % 16 * 2 + i / 16 % 2;
    return word / 8 * 16 + i / 32 * 8 + word % 8;
  } else if constexpr (kType == DType::kBFloat16 && !kDot) {
    return i % 16 * 2 + i / 16;
  } else {
    return i;
  }
}

/// Loads one chunk of a key. With kPart: its first `count` components, and zeros for the others.
template <DType kType, bool kDot, bool kPart>
FOLIO_INLINE void load_key(const Upcaster<kType>& upcaster, const unsigned char* from, int32_t count, __m512i* vecs) {
  const int32_t bytes = kPart ? count * static_cast<int32_t>(element_bytes(kType)) : 128;
  if constexpr (kType == DType::kInt8) {
    vecs[0] = upcast_int8_lanes(load_sixteen(from, kPart ? count : 16));
    vecs[1] = upcast_int8_lanes(load_sixteen(from + 16, kPart ? count - 16 : 16));
    return;
  }
  const __m512i line = load_bytes(from, bytes);
  if constexpr (kType == DType::kFloat32) {
    vecs[0] = line;
    vecs[1] = load_bytes(from + 64, bytes - 64);
  } else if constexpr (kType == DType::kFloat16) {
    if constexpr (kPart) {
      vecs[0] = _mm512_castps_si512(upcast_lower_float16(line));
      vecs[1] = _mm512_castps_si512(upcast_upper_float16(line));
    } else {
      vecs[0] = _mm512_castps_si512(_mm512_cvtph_ps(half_line(from)));
      vecs[1] = _mm512_castps_si512(_mm512_cvtph_ps(half_line(from + 32)));
    }
  } else {
    __m512i words[2] = {line, line};
    if constexpr (is_fp8_type(kType)) upcaster.lookup.upcast(line, words[0], words[1]);
#pragma GCC unroll 2
    for (int i = 0; i < kKeyDims<kType> / 32; ++i) {
      if constexpr (kDot) {
        vecs[i] = words[i];
      } else {
        vecs[2 * i] = _mm512_castps_si512(even_words(words[i]));
        vecs[2 * i + 1] = _mm512_castps_si512(odd_words(words[i]));
      }
    }
  }
}

/// V is read in units of 32 components, in their order.
inline constexpr int kUnitVecs = 2;
inline constexpr int kUnitDims = kUnitVecs * kLanes;

/// Permutations of a line's bytes or words that leave components in order after upcasting.
struct alignas(64) LineOrder {
  uint8_t doubled_fp8[64];    ///< of 32 fp8 values: 0, 0, 16, 16, 1, 1, 17, 17, ...
  uint8_t paired_fp8[64];     ///< of 32 pairs: such that upcasting gives components 0 to 15 and 16 to 31
  uint8_t two_rows_fp8[64];   ///< the same from two rows; the second's bytes count from 64 on
  uint16_t halves[32];        ///< of 32 words: 0, 16, 1, 17, ...
  uint16_t split_halves[32];  ///< of 16 pairs of words: 0, 2, 4, ..., 1, 3, 5, ...
};

consteval LineOrder make_line_order() {
  LineOrder order{};
  for (int i = 0; i < 32; ++i) {
    const int component = i / 2 + i % 2 * 16;
    order.halves[i] = static_cast<uint16_t>(component);
    order.split_halves[i] = static_cast<uint16_t>(i < 16 ? 2 * i : 2 * i - 31);
    order.doubled_fp8[2 * i] = order.doubled_fp8[2 * i + 1] = static_cast<uint8_t>(component);
    // Upcasting takes the lower 8 bytes of every 16 into the first register: pair i stands in quarter i / 4 % 4.
    const int to = i % 16 / 4 * 16 + i / 16 * 8 + i % 4 * 2;
    order.paired_fp8[to] = static_cast<uint8_t>(2 * i);
    order.paired_fp8[to + 1] = static_cast<uint8_t>(2 * i + 1);
    order.two_rows_fp8[to] = static_cast<uint8_t>(i);
    order.two_rows_fp8[to + 1] = static_cast<uint8_t>(64 + i);
  }
  return order;
}
static constexpr LineOrder kLineOrder = make_line_order();

/// Loads one unit of one token's V.
template <DType kType, bool kPart>
FOLIO_INLINE void load_values(const Upcaster<kType>& upcaster, const unsigned char* from, int32_t count, __m512* vecs) {
  if constexpr (is_fp8_type(kType)) {
    const __m256i line = _mm512_castsi512_si256(load_bytes(from, kPart ? count : 32));
    const __m512i fp8 =
        _mm512_permutexvar_epi8(_mm512_load_si512(kLineOrder.doubled_fp8), _mm512_castsi256_si512(line));
    const __m512i words = upcaster.lookup.upcast_doubled(fp8);
    vecs[0] = even_words(words);
    vecs[1] = odd_words(words);
  } else if constexpr (kType == DType::kBFloat16) {
    const __m512i line = load_bytes(from, kPart ? 2 * count : 64);
    const __m512i words = _mm512_permutexvar_epi16(_mm512_load_si512(kLineOrder.halves), line);
    vecs[0] = even_words(words);
    vecs[1] = odd_words(words);
  } else {
    __m512i halves[kUnitVecs];
    load_key<kType, false, kPart>(upcaster, from, count, halves);
    vecs[0] = _mm512_castsi512_ps(halves[0]);
    vecs[1] = _mm512_castsi512_ps(halves[1]);
  }
}

/// Loads one unit of the V of a pair of tokens.
template <DType kType, bool kPart>
FOLIO_INLINE void load_value_pairs(const Upcaster<kType>& upcaster, const unsigned char* from, int32_t count,
                                   __m512* even, __m512* odd) {
  if constexpr (is_fp8_type(kType)) {
    const __m512i line = load_bytes(from, kPart ? 2 * count : 64);
    const __m512i fp8 = _mm512_permutexvar_epi8(_mm512_load_si512(kLineOrder.paired_fp8), line);
    __m512i first, second;
    upcaster.lookup.upcast(fp8, first, second);
    even[0] = even_words(first);
    odd[0] = odd_words(first);
    even[1] = even_words(second);
    odd[1] = odd_words(second);
  } else {
#pragma GCC unroll 2
    for (int c = 0; c < kUnitVecs; ++c) {
      if constexpr (kType == DType::kInt8) {
        const __m512i line = load_bytes(from + 32 * c, kPart ? smaller(2 * count - 32 * c, 32) : 32);
        const __m512i words = _mm512_maskz_cvtepu16_epi32(0xffff, _mm512_castsi512_si256(line));
        even[c] = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24));
        odd[c] = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_srai_epi32(_mm512_slli_epi32(words, 16), 24));
        continue;
      }
      const __m512i line = load_bytes(from + 64 * c, kPart ? 4 * count - 64 * c : 64);
      if constexpr (kType == DType::kBFloat16) {
        even[c] = even_words(line);
        odd[c] = odd_words(line);
      } else {
        const __m512i halves = _mm512_permutexvar_epi16(_mm512_load_si512(kLineOrder.split_halves), line);
        even[c] = upcast_lower_float16(halves);
        odd[c] = upcast_upper_float16(halves);
      }
    }
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
