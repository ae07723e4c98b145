#pragma once

#include "kernels/cpu/common/producer.hpp"

/// Loads K and V and upcasts them exactly, a line at a time, in as few operations as their order allows: a bfloat16 is
/// the upper half of its float, so a register of them becomes two registers of floats by one shift and one mask.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

FOLIO_INLINE constexpr bool is_byte_type(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2 || dtype == DType::kInt8;
}

/// Keeps a value in a register. Compilers would load it again for each instruction that uses it, and Zen 3 loads two
/// registers a cycle, as many as it multiplies.
FOLIO_INLINE Vec in_register(Vec value) {
  asm("" : "+x"(value));
  return value;
}
FOLIO_INLINE const unsigned char* in_register(const unsigned char* value) {
  asm("" : "+r"(value));
  return value;
}

/// A line: the components that are loaded together, as kLineVecs registers of floats.
template <DType kType>
inline constexpr int kLineDims = is_byte_type(kType) ? 32 : 16;
template <DType kType>
inline constexpr int kLineVecs = kLineDims<kType> / kLanes;
template <DType kType>
inline constexpr int32_t kLineBytes = kLineDims<kType>* static_cast<int32_t>(element_bytes(kType));

/// The component that load_line puts in place `i` of a line, counted over its registers.
template <DType kType>
FOLIO_INLINE constexpr int line_component(int i) {
  return kType == DType::kBFloat16 ? i % 8 * 2 + i / 8 : i;
}

FOLIO_INLINE __m256i load_bytes(const unsigned char* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

/// The even and the odd words of 16 bfloat16 as floats.
FOLIO_INLINE Vec even_words(__m256i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
FOLIO_INLINE Vec odd_words(__m256i words) {
  return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-65536)));
}

/// The lower and the upper eight of 16 float16 as floats.
FOLIO_INLINE Vec lower_halves(__m256i halves) {
  return _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
}
FOLIO_INLINE Vec upper_halves_of(__m256i halves) {
  return _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}

/// 32 e4m3 values as bfloat16: of every 16, the lower 8 in `first`, the upper 8 in `second`. A code's upper four bits
/// decide the upper byte of its bfloat16, its lower four the lower byte, except for magnitudes below 16 (the subnormals
/// are among them), where the lower four decide both, and NaN.
FOLIO_INLINE void upcast_e4m3(__m256i codes, __m256i& first, __m256i& second) {
  const auto table = [](int64_t low, int64_t high) __attribute__((always_inline)) {
    return _mm256_setr_epi64x(low, high, low, high);
  };
  const auto bytes = [](int value) __attribute__((always_inline)) {
    return _mm256_set1_epi8(static_cast<char>(value));
  };
  const __m256i lower_four = _mm256_and_si256(codes, bytes(0x0f));
  const __m256i upper_four = _mm256_and_si256(_mm256_srli_epi16(codes, 4), bytes(0x0f));
  const __m256i is_small = _mm256_cmpeq_epi8(_mm256_and_si256(codes, bytes(0x70)), _mm256_setzero_si256());
  const __m256i is_nan = _mm256_cmpeq_epi8(_mm256_or_si256(codes, bytes(0x80)), bytes(0xff));
  const __m256i small_upper = _mm256_shuffle_epi8(table(0x3c3c3c3c3b3b3b00, 0x3c3c3c3c3c3c3c3c), lower_four);
  const __m256i small_lower = _mm256_shuffle_epi8(table(0x60402000c0800000, 0xf0e0d0c0b0a09080ULL), lower_four);
  const __m256i large_upper = _mm256_shuffle_epi8(table(0x434241403f3e3d00, 0xc3c2c1c0bfbebd80ULL), upper_four);
  const __m256i lower = _mm256_blendv_epi8(_mm256_slli_epi16(lower_four, 4), small_lower, is_small);
  const __m256i fixes = _mm256_or_si256(_mm256_and_si256(small_upper, is_small), _mm256_and_si256(is_nan, bytes(0x7f)));
  const __m256i upper = _mm256_or_si256(large_upper, fixes);
  first = _mm256_unpacklo_epi8(lower, upper);
  second = _mm256_unpackhi_epi8(lower, upper);
}

/// Loads one line. With kPart: its first `count` components, and zeros for the others; nothing beyond them is read.
template <DType kType, bool kPart>
FOLIO_INLINE void load_line(const unsigned char* from, int32_t count, Vec* vecs) {
  unsigned char padded[kPart ? kLineBytes<kType> : 1];
  if constexpr (kPart) {
    __builtin_memset(padded, 0, sizeof(padded));
    __builtin_memcpy(padded, from, static_cast<size_t>(count * element_bytes(kType)));
    from = padded;
  }
  if constexpr (kType == DType::kBFloat16) {
    const __m256i words = load_bytes(from);
    vecs[0] = even_words(words);
    vecs[1] = odd_words(words);
  } else if constexpr (kType == DType::kFloat8E4M3) {
    // Unpacking stays within 128 bits: what shall be neighbours in the end must be so in the beginning.
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    __m256i first, second;
    upcast_e4m3(_mm256_permutevar8x32_epi32(load_bytes(from), order), first, second);
    const __m256i zero = _mm256_setzero_si256();
    vecs[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first));
    vecs[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first));
    vecs[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, second));
    vecs[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, second));
  } else if constexpr (kType == DType::kFloat8E5M2) {  // the upper byte of a float16
    const __m256i codes = load_bytes(from);
    const __m256i first = _mm256_unpacklo_epi8(_mm256_setzero_si256(), codes);
    const __m256i second = _mm256_unpackhi_epi8(_mm256_setzero_si256(), codes);
    vecs[0] = lower_halves(first);
    vecs[1] = lower_halves(second);
    vecs[2] = upper_halves_of(first);
    vecs[3] = upper_halves_of(second);
  } else {
#pragma GCC unroll 4
    for (int c = 0; c < kLineVecs<kType>; ++c) vecs[c] = load_elements<kType>(from + c * kLanes * element_bytes(kType));
  }
}

/// Loads one line of each token of a pair, from packed pages.
template <DType kType, bool kPart>
FOLIO_INLINE void load_line_of_pairs(const unsigned char* from, int32_t count, Vec* even, Vec* odd) {
  unsigned char padded[kPart ? 2 * kLineBytes<kType> : 1];
  if constexpr (kPart) {
    __builtin_memset(padded, 0, sizeof(padded));
    __builtin_memcpy(padded, from, static_cast<size_t>(2 * count * element_bytes(kType)));
    from = padded;
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half, from += 32) {
    const __m256i line = load_bytes(from);
    if constexpr (kType == DType::kBFloat16) {
      even[half] = even_words(line);
      odd[half] = odd_words(line);
    } else if constexpr (kType == DType::kFloat16) {
      const __m256i split = _mm256_shuffle_epi8(
          line, _mm256_setr_epi64x(0x0d0c090805040100, 0x0f0e0b0a07060302, 0x0d0c090805040100, 0x0f0e0b0a07060302));
      const __m256i halves = _mm256_permute4x64_epi64(split, _MM_SHUFFLE(3, 1, 2, 0));
      even[half] = lower_halves(halves);
      odd[half] = upper_halves_of(halves);
    } else if constexpr (kType == DType::kFloat8E4M3) {
      __m256i first, second;
      upcast_e4m3(_mm256_permute4x64_epi64(line, _MM_SHUFFLE(3, 1, 2, 0)), first, second);
      even[2 * half] = even_words(first);
      odd[2 * half] = odd_words(first);
      even[2 * half + 1] = even_words(second);
      odd[2 * half + 1] = odd_words(second);
    } else if constexpr (kType == DType::kInt8) {
#pragma GCC unroll 2
      for (int quarter = 0; quarter < 2; ++quarter) {
        even[2 * half + quarter] = load_of_pairs<kType, 0>(from + 16 * quarter);
        odd[2 * half + quarter] = load_of_pairs<kType, 1>(from + 16 * quarter);
      }
    } else {
      const __m256i first = _mm256_slli_epi16(line, 8);
      const __m256i second = _mm256_and_si256(line, _mm256_set1_epi16(-256));
      even[2 * half] = lower_halves(first);
      even[2 * half + 1] = upper_halves_of(first);
      odd[2 * half] = lower_halves(second);
      odd[2 * half + 1] = upper_halves_of(second);
    }
  }
}

/// Puts the components of a line, or of sums over lines, in order. Those of packed pages are so.
template <DType kType, bool kPairs>
FOLIO_INLINE void put_in_order(Vec* vecs) {
  if constexpr (kType == DType::kBFloat16 && !kPairs) {
    const Vec lower = _mm256_unpacklo_ps(vecs[0], vecs[1]);
    const Vec upper = _mm256_unpackhi_ps(vecs[0], vecs[1]);
    vecs[0] = _mm256_permute2f128_ps(lower, upper, 0x20);
    vecs[1] = _mm256_permute2f128_ps(lower, upper, 0x31);
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
