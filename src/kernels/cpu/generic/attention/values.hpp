#pragma once

#include "kernels/cpu/common/attention/locate.hpp"
#include "kernels/cpu/common/attention/prefetch.hpp"

/// Weighted sums of values: acc = acc * rescale, then the tokens in order, each a multiply-add. A token that a row does
/// not see has weight 0 and changes nothing, so that rows may share loops that cover more than their own tokens.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Registers of the value dimension that a block of kRows rows keeps at a time: what the register file holds.
template <int kRows>
inline constexpr int kValueVecs = (kLanes == 16 ? 8 : 4) / (kRows <= 2 ? 1 : 2);

/// Tokens of a tile.
struct TokenSpan {
  int32_t begin;
  int32_t end;
};

/// The sums of kRows rows and kVecs registers: loaded and rescaled, and at the end stored.
template <int kRows, int kVecs>
struct ValueSums {
  Vec sums[kRows][kVecs];

  FOLIO_INLINE_MEMBER void begin(const float* acc, int32_t stride, const float* rescale) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) sums[i][c] = load<Vec>(acc + i * stride + c * kLanes) * splat(rescale[i]);
    }
  }
  FOLIO_INLINE_MEMBER void add(const float* weights, const Vec* values) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec weight = splat(weights[i * kTileTokens]);
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) sums[i][c] = multiply_add(weight, values[c], sums[i][c]);
    }
  }
  FOLIO_INLINE_MEMBER void end(float* acc, int32_t stride) const {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) store(acc + i * stride + c * kLanes, sums[i][c]);
    }
  }
};

/// One block from converted values.
template <int kRows, int kVecs>
FOLIO_INLINE void value_block(const ItemCall& call, int32_t r, int32_t d, TokenSpan span) {
  float* const acc = call.states.acc + r * call.v_stride + d;
  const float* const weights = call.scratch.p + r * kTileTokens;
  ValueSums<kRows, kVecs> block;
  block.begin(acc, call.v_stride, call.scratch.rescale + r);
  for (int32_t t = span.begin; t < span.end; ++t) {
    Vec values[kVecs];
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) values[c] = load<Vec>(call.scratch.v + t * call.v_stride + d + c * kLanes);
    block.add(weights + t, values);
  }
  block.end(acc, call.v_stride);
}

/// Components [d, v_stride) of rows [r, r + kRows), from converted values.
template <int kRows, int kVecs>
FOLIO_INLINE void value_blocks(const ItemCall& call, int32_t r, int32_t d, TokenSpan span) {
  for (; d + kVecs * kLanes <= call.v_stride; d += kVecs * kLanes) value_block<kRows, kVecs>(call, r, d, span);
  if constexpr (kVecs > 1) value_blocks<kRows, kVecs / 2>(call, r, d, span);
}

/// Rows [r, r + kRows) from converted values.
template <int kRows>
static void value_rows(const ItemCall& call, const uint64_t* visible, int32_t r) {
  uint64_t any = 0;
  for (int i = 0; i < kRows; ++i) any |= visible[r + i];
  if (any == 0) return;
  value_blocks<kRows, kValueVecs<kRows>>(call, r, 0, {__builtin_ctzll(any), 64 - __builtin_clzll(any)});
}

/// One block straight from memory, the values converted on the way. `ahead` is asked for meanwhile, in as many parts as
/// the dimension has blocks.
template <DType kType, bool kPairs, int kRows, int kVecs>
FOLIO_INLINE void stored_value_block(const ItemCall& call, int32_t r, const unsigned char* const* v_rows, int32_t d,
                                     TokenSpan span, const Stream& ahead) {
  constexpr int64_t kElement = element_bytes(kType);
  const int32_t count = call.head_dim_v - d;  // fewer than kVecs * kLanes only where kVecs is 1
  const float* const weights = call.scratch.p + r * kTileTokens;
  float* const acc = call.states.acc + r * call.v_stride + d;
  const int32_t part = d / (kVecs * kLanes);
  const int32_t parts = (call.head_dim_v + kVecs * kLanes - 1) / (kVecs * kLanes);
  ValueSums<kRows, kVecs> block;
  block.begin(acc, call.v_stride, call.scratch.rescale + r);
  if constexpr (kPairs) {
    for (int32_t pair = span.begin / 2; pair < (span.end + 1) / 2; ++pair) {
      ahead.request(2 * pair, part, parts);
      ahead.request(2 * pair + 1, part, parts);
      const unsigned char* const row = v_rows[pair] + 2 * d * kElement;
      Vec even[kVecs];
      Vec odd[kVecs];
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) {
        const unsigned char* const at = row + 2 * c * kLanes * kElement;
        const bool some = kVecs == 1 && count < kLanes;
        even[c] = some ? load_some_of_pairs<kType, 0>(at, count) : load_of_pairs<kType, 0>(at);
        odd[c] = some ? load_some_of_pairs<kType, 1>(at, count) : load_of_pairs<kType, 1>(at);
      }
      block.add(weights + 2 * pair, even);
      block.add(weights + 2 * pair + 1, odd);
    }
  } else {
    for (int32_t t = span.begin; t < span.end; ++t) {
      ahead.request(t, part, parts);
      const unsigned char* const row = v_rows[t] + d * kElement;
      Vec values[kVecs];
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) {
        const unsigned char* const at = row + c * kLanes * kElement;
        values[c] = kVecs == 1 && count < kLanes ? load_some<kType>(at, count) : load_elements<kType>(at);
      }
      block.add(weights + t, values);
    }
  }
  block.end(acc, call.v_stride);
}

template <DType kType, bool kPairs, int kRows, int kVecs>
FOLIO_INLINE void stored_value_blocks(const ItemCall& call, int32_t r, const unsigned char* const* v_rows, int32_t d,
                                      TokenSpan span, const Stream& ahead) {
  for (; kVecs == 1 ? d < call.head_dim_v : d + kVecs * kLanes <= call.head_dim_v; d += kVecs * kLanes) {
    stored_value_block<kType, kPairs, kRows, kVecs>(call, r, v_rows, d, span, ahead);
  }
  if constexpr (kVecs > 1) stored_value_blocks<kType, kPairs, kRows, kVecs / 2>(call, r, v_rows, d, span, ahead);
}

/// Rows [r, r + kRows) straight from memory: for tiles of which every row sees exactly the tokens of `span`.
template <DType kType, bool kPairs, int kRows>
static void values_from_stored(const ItemCall& call, int32_t r, const unsigned char* const* v_rows, TokenSpan span,
                               const Stream& ahead) {
  stored_value_blocks<kType, kPairs, kRows, kValueVecs<kRows>>(call, r, v_rows, 0, span, ahead);
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
