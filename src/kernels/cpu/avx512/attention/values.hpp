#pragma once

#include "kernels/cpu/avx512/attention/loads.hpp"
#include "kernels/cpu/avx512/attention/stream.hpp"
#include "kernels/cpu/common/attention/locate.hpp"

/// Weighted sums of values: acc = acc * rescale, then the tokens in order, each a multiply-add. A token that a row does
/// not see has weight 0 and changes nothing, so that rows may share loops that cover more than their own tokens.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Tokens of a tile.
struct TokenSpan {
  int32_t begin;
  int32_t end;
};

/// Units of the value dimension that a block of kRows rows keeps in registers.
template <int kRows>
inline constexpr int kBlockUnits = kRows == 8   ? 1
                                   : kRows == 4 ? 2
                                                : 4;

/// The sums of kRows rows and kUnits units. With kPart, of the only unit's first `count` components.
template <int kRows, int kUnits, bool kPart>
struct ValueSums {
  static constexpr int kVecs = kUnits * kUnitVecs;
  __m512 sums[kRows][kVecs];

  FOLIO_INLINE_MEMBER static __mmask16 lanes(int c, int32_t count) {
    const int32_t left = count - c * kLanes;
    return static_cast<__mmask16>(left >= kLanes ? 0xffff : left <= 0 ? 0 : 0xffff >> (kLanes - left));
  }
  FOLIO_INLINE_MEMBER void begin(const float* acc, int32_t stride, const float* rescale, int32_t count) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512 factor = _mm512_set1_ps(rescale[i]);
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) {
        const float* const at = acc + i * stride + c * kLanes;
        sums[i][c] = _mm512_mul_ps(kPart ? _mm512_maskz_loadu_ps(lanes(c, count), at) : _mm512_loadu_ps(at), factor);
      }
    }
  }
  /// Adds a token's values of one unit.
  FOLIO_INLINE_MEMBER void add(int unit, const float* weights, const __m512* values) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512 weight = _mm512_set1_ps(weights[i * kTileTokens]);
#pragma GCC unroll 2
      for (int c = 0; c < kUnitVecs; ++c) {
        __m512& sum = sums[i][unit * kUnitVecs + c];
        sum = _mm512_fmadd_ps(weight, values[c], sum);
      }
    }
  }
  FOLIO_INLINE_MEMBER void end(float* acc, int32_t stride, int32_t count) const {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) {
        float* const at = acc + i * stride + c * kLanes;
        if constexpr (kPart) {
          _mm512_mask_storeu_ps(at, lanes(c, count), sums[i][c]);
        } else {
          _mm512_storeu_ps(at, sums[i][c]);
        }
      }
    }
  }
};

/// Components [d, d + kUnits * kUnitDims) of rows [r, r + kRows) straight from memory.
template <DType kType, bool kPairs, int kRows, int kUnits, bool kPart>
FOLIO_INLINE void stored_value_block(const ItemCall& call, int32_t r, const unsigned char* const* v_rows, int32_t d,
                                     TokenSpan span, const Stream& ahead) {
  constexpr int64_t kElement = element_bytes(kType);
  constexpr int64_t kUnitBytes = kUnitDims * kElement;
  const Converter<kType> converter;
  const int32_t count = call.head_dim_v - d;
  const float* const weights = call.scratch.p + r * kTileTokens;
  float* const acc = call.states.acc + r * call.v_stride + d;
  ValueSums<kRows, kUnits, kPart> block;
  block.begin(acc, call.v_stride, call.scratch.rescale + r, count);
  if constexpr (kPairs) {
    for (int32_t t = span.begin & ~1; t < span.end; t += 2) {
      ahead.request(t);
      ahead.request(t + 1);
      const unsigned char* const row = v_rows[t / 2] + 2 * d * kElement;
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; ++u) {
        __m512 even[kUnitVecs];
        __m512 odd[kUnitVecs];
        load_value_pairs<kType, kPart>(converter, row + 2 * u * kUnitBytes, count, even, odd);
        block.add(u, weights + t, even);
        block.add(u, weights + t + 1, odd);
      }
    }
  } else {
    for (int32_t t = span.begin; t < span.end; ++t) {
      ahead.request(t);
      const unsigned char* const row = v_rows[t] + d * kElement;
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; ++u) {
        __m512 values[kUnitVecs];
        load_values<kType, kPart>(converter, row + u * kUnitBytes, count, values);
        block.add(u, weights + t, values);
      }
    }
  }
  block.end(acc, call.v_stride, count);
}

/// Components [d, head_dim_v), in blocks of kUnits units and smaller ones for what is left. Each asks for its share of
/// `ahead`.
template <DType kType, bool kPairs, int kRows, int kUnits>
FOLIO_INLINE void stored_value_blocks(const ItemCall& call, int32_t r, const unsigned char* const* v_rows, int32_t d,
                                      TokenSpan span, const Stream& ahead) {
  const int32_t units = (call.head_dim_v + kUnitDims - 1) / kUnitDims;
  const auto share = [&](int32_t first) __attribute__((always_inline)) {
    const int32_t unit = first / kUnitDims;
    Stream some = ahead.part(unit, units);
    some.end = ahead.part(unit + (kUnits < units - unit ? kUnits : units - unit) - 1, units).end;
    return some;
  };
  for (; d + kUnits * kUnitDims <= call.head_dim_v; d += kUnits * kUnitDims) {
    stored_value_block<kType, kPairs, kRows, kUnits, false>(call, r, v_rows, d, span, share(d));
  }
  if constexpr (kUnits > 1) {
    stored_value_blocks<kType, kPairs, kRows, kUnits / 2>(call, r, v_rows, d, span, ahead);
  } else if (d < call.head_dim_v) {
    stored_value_block<kType, kPairs, kRows, 1, true>(call, r, v_rows, d, span, share(d));
  }
}

/// Rows [r, r + kRows) straight from memory: for tiles of which every row sees exactly the tokens of `span`.
template <DType kType, bool kPairs, int kRows>
static void values_from_stored(const ItemCall& call, int32_t r, const unsigned char* const* v_rows, TokenSpan span,
                               const Stream& ahead) {
  stored_value_blocks<kType, kPairs, kRows, kBlockUnits<kRows>>(call, r, v_rows, 0, span, ahead);
}

/// The tile's values as floats, in scratch memory.
template <DType kType>
static void convert_values(const ItemCall& call, const unsigned char* const* v_rows, const Stream& ahead) {
  constexpr int64_t kElement = element_bytes(kType);
  const Converter<kType> converter;
  const int32_t dim = call.head_dim_v;
  const auto store_unit = [&](int32_t t, int32_t d, const __m512* vecs) __attribute__((always_inline)) {
    float* const to = call.scratch.v + t * call.v_stride + d;
    _mm512_storeu_ps(to, vecs[0]);
    if (d + kLanes < dim) _mm512_storeu_ps(to + kLanes, vecs[1]);
  };
  for (int32_t t = 0; t < kTileTokens; t += 2) {
    ahead.request(t);
    ahead.request(t + 1);
    for (int32_t d = 0; d < dim; d += kUnitDims) {
      const bool part = dim - d < kUnitDims;
      __m512 first[kUnitVecs] = {};
      __m512 second[kUnitVecs] = {};
      if (call.keys.packed_v) {
        const unsigned char* const from = v_rows[t / 2] + 2 * d * kElement;
        if constexpr (kType != DType::kFloat32) {
          if (part) {
            load_value_pairs<kType, true>(converter, from, dim - d, first, second);
          } else {
            load_value_pairs<kType, false>(converter, from, kUnitDims, first, second);
          }
        }
      } else if (part) {
        load_values<kType, true>(converter, v_rows[t] + d * kElement, dim - d, first);
        load_values<kType, true>(converter, v_rows[t + 1] + d * kElement, dim - d, second);
      } else {
        load_values<kType, false>(converter, v_rows[t] + d * kElement, kUnitDims, first);
        load_values<kType, false>(converter, v_rows[t + 1] + d * kElement, kUnitDims, second);
      }
      store_unit(t, d, first);
      store_unit(t + 1, d, second);
    }
  }
}

/// Rows [r, r + kRows) from converted values, over the tokens that some of them sees.
template <int kRows>
static void values_from_converted(const ItemCall& call, const uint64_t* visible, int32_t r) {
  uint64_t any = 0;
  for (int i = 0; i < kRows; ++i) any |= visible[r + i];
  if (any == 0) return;
  const TokenSpan span{__builtin_ctzll(any), 64 - __builtin_clzll(any)};
  const float* const weights = call.scratch.p + r * kTileTokens;
  float* const acc = call.states.acc + r * call.v_stride;
  const auto block_of = [&]<int kUnits, bool kPart>(int32_t d) __attribute__((always_inline)) {
    ValueSums<kRows, kUnits, kPart> block;
    const int32_t count = call.head_dim_v - d;
    block.begin(acc + d, call.v_stride, call.scratch.rescale + r, count);
    for (int32_t t = span.begin; t < span.end; ++t) {
      const float* const from = call.scratch.v + t * call.v_stride + d;
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; ++u) {
        __m512 values[kUnitVecs];
#pragma GCC unroll 2
        for (int c = 0; c < kUnitVecs; ++c) {
          const float* const at = from + (u * kUnitVecs + c) * kLanes;
          values[c] = kPart ? _mm512_maskz_loadu_ps(block.lanes(c, count), at) : _mm512_loadu_ps(at);
        }
        block.add(u, weights + t, values);
      }
    }
    block.end(acc + d, call.v_stride, count);
  };
  constexpr int kUnits = kBlockUnits<kRows>;
  int32_t d = 0;
  for (; d + kUnits * kUnitDims <= call.head_dim_v; d += kUnits * kUnitDims)
    block_of.template operator()<kUnits, false>(d);
  for (; d + kUnitDims <= call.head_dim_v; d += kUnitDims) block_of.template operator()<1, false>(d);
  if (d < call.head_dim_v) block_of.template operator()<1, true>(d);
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
