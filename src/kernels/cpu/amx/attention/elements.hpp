#pragma once

#include "kernels/cpu/amx/attention/step.hpp"
#include "kernels/cpu/common/attention/fp8_tables.hpp"

/// Elements of the cache as bfloat16, which holds every fp8 value exactly: bfloat16 is multiplied as it lies, fp8 from
/// copies.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

FOLIO_INLINE bool holds_fp8(const ItemKeys& keys) {
  return keys.dtype != DType::kBFloat16;
}

FOLIO_INLINE int32_t element_bytes(const ItemKeys& keys) {
  return holds_fp8(keys) ? 1 : kElement;
}

/// Element `i` of a row as bfloat16.
FOLIO_INLINE uint16_t bfloat16_element(const ItemKeys& keys, const unsigned char* from, int32_t i) {
  if (!holds_fp8(keys)) return load<uint16_t>(from + i * kElement);
  const Fp8Table& table = keys.dtype == DType::kFloat8E4M3 ? kE4M3Table : kE5M2Table;
  const uint32_t code = from[i];
  const uint32_t magnitude = uint32_t{table.high[code & 0x7f]} << 8 | table.low[code & 0x7f];
  return static_cast<uint16_t>(magnitude | (code & 0x80) << 8);
}

/// 64 codes as bfloat16, in order.
FOLIO_INLINE void unpack_in_order(const Fp8Lookup& lookup, __m512i codes, __m512i& first, __m512i& second) {
  // Unpacking takes the lower half of each 128 bits, then the upper: the quarters that it takes are brought there.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  lookup.unpack(_mm512_permutexvar_epi64(order, codes), first, second);
}

/// n fp8 codes (a multiple of 8) to bfloat16, in order. Whole lines of 32 are written: zeros beyond n.
template <DType kType>
static inline void widen_codes(const unsigned char* codes, int32_t n, unsigned char* to) {
  const Fp8Lookup lookup = Fp8Lookup::of<kType>();
  for (int32_t i = 0; i < n; i += 64, codes += 64, to += 128) {
    const int32_t left = n - i;
    const __m512i line =
        left >= 64 ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - left), codes);
    __m512i first;
    __m512i second;
    unpack_in_order(lookup, line, first, second);
    store(to, first);
    if (left > 32) store(to + 64, second);
  }
}

/// n elements of a row (a multiple of 8) as bfloat16, and zeros up to the next whole line of 32.
static inline void copy_elements(const ItemKeys& keys, const unsigned char* from, int32_t n, unsigned char* to) {
  if (keys.dtype == DType::kFloat8E4M3) {
    widen_codes<DType::kFloat8E4M3>(from, n, to);
  } else if (keys.dtype == DType::kFloat8E5M2) {
    widen_codes<DType::kFloat8E5M2>(from, n, to);
  } else {
    const int32_t bytes = n * kElement;
    __builtin_memcpy(to, from, static_cast<size_t>(bytes));
    __builtin_memset(to + bytes, 0, static_cast<size_t>(rounded_up(bytes, 64) - bytes));
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
