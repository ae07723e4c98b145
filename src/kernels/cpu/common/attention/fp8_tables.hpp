#pragma once

#include <cstdint>

#include "kernels/cpu/common/attention/vec.hpp"

/// fp8 codes without their sign as bfloat16, which holds every one of them exactly: one table per byte, because a
/// register pair is a table of 128 bytes.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

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
  /// 64 codes as bfloat16: of every 16, the lower 8 in `first`, the upper in `second`. Lookups ignore a code's sign
  /// bit.
  FOLIO_INLINE_MEMBER void unpack(__m512i codes, __m512i& first, __m512i& second) const {
    const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    const __m512i upper = with_sign(magnitude, codes, _mm512_set1_epi8(-128));
    first = _mm512_unpacklo_epi8(lower, upper);
    second = _mm512_unpackhi_epi8(lower, upper);
  }
  /// 32 codes, each in both bytes of a word, as bfloat16.
  FOLIO_INLINE_MEMBER __m512i doubled(__m512i codes) const {
    const __m512i lower = _mm512_mask2_permutex2var_epi8(low[0], codes, 0x5555555555555555, low[1]);
    const __m512i both = _mm512_mask2_permutex2var_epi8(high[0], lower, 0xaaaaaaaaaaaaaaaa, high[1]);
    return with_sign(both, codes, _mm512_set1_epi16(INT16_MIN));
  }

 private:
  FOLIO_INLINE_MEMBER static __m512i with_sign(__m512i magnitude, __m512i codes, __m512i sign) {
    return _mm512_ternarylogic_epi32(magnitude, codes, sign, 0xf8);  // a | (b & c)
  }
};

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
