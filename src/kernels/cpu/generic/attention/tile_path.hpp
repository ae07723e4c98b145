#pragma once

#include "kernels/cpu/generic/attention/softmax.hpp"

/// Many rows: a tile's keys and values are converted to floats once, in scratch, and every row reads them there.
namespace folio::inline v0::kernels::generic::FOLIO_ISA {

inline constexpr int kScoreRows = kLanes / 4;  ///< rows of a block of scores; 4 tokens wide: sum_lanes
inline constexpr int kValueVecs = kLanes == 16 ? 4 : 2;

template <DType kType>
FOLIO_INLINE void convert_row(const unsigned char* from, int32_t dim, float* to) {
  int32_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load_elements<kType>(from + d * element_bytes(kType)));
  if (d < dim) {
    store(to + d, load_some<kType>(from + d * element_bytes(kType), dim - d));
    d += kLanes;
  }
  for (const int32_t padded = (dim + kDimPadding - 1) / kDimPadding * kDimPadding; d < padded; d += kLanes) {
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
  for (const int32_t padded = (dim + kDimPadding - 1) / kDimPadding * kDimPadding; d < padded; d += kLanes) {
    store(to + d, Vec{});
  }
}

template <DType kType>
static void convert_keys(const ItemCall& call) {
  for (int32_t t = 0; t < kTileTokens; ++t) {
    convert_row<kType>(call.scratch.k_rows[t], call.head_dim_qk, call.scratch.k + t * call.qk_stride);
  }
}

template <DType kType>
static void convert_values(const ItemCall& call) {
  for (int32_t t = 0; t < kTileTokens; ++t) {
    convert_row<kType>(call.scratch.v_rows[t], call.head_dim_v, call.scratch.v + t * call.v_stride);
  }
}

template <DType kType>
static void convert_paired_values(const ItemCall& call) {
  for (int32_t pair = 0; pair < kTileTokens / 2; ++pair) {
    float* const even = call.scratch.v + 2 * pair * call.v_stride;
    convert_row_of_pairs<kType, 0>(call.scratch.v_rows[pair], call.head_dim_v, even);
    convert_row_of_pairs<kType, 1>(call.scratch.v_rows[pair], call.head_dim_v, even + call.v_stride);
  }
}

/// True if a converted value of the tile is infinite or NaN.
FOLIO_INLINE bool has_special_values(const ItemCall& call) {
  const IntVec exponent = splat_int(0x7f800000);
  IntVec special{};
  const int32_t count = kTileTokens * call.v_stride;
  for (int32_t i = 0; i < count; i += kLanes) {
    special |= (bits(load<Vec>(call.scratch.v + i)) & exponent) == exponent;
  }
  for (int i = 0; i < kLanes; ++i) {
    if (special[i] != 0) return true;
  }
  return false;
}

/// Scores of kScoreRows rows and 4 tokens: sums over the dimensions in one order, lane by lane.
FOLIO_INLINE void score_block(const float* q, const float* k, int32_t stride, float* scores) {
  Vec sums[kLanes] = {};
  for (int32_t d = 0; d < stride; d += kLanes) {
    Vec rows[kScoreRows];
#pragma GCC unroll 4
    for (int i = 0; i < kScoreRows; ++i) rows[i] = load<Vec>(q + i * stride + d);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Vec token = load<Vec>(k + j * stride + d);
#pragma GCC unroll 4
      for (int i = 0; i < kScoreRows; ++i) {
        sums[kScoreRows * j + i] = multiply_add(rows[i], token, sums[kScoreRows * j + i]);
      }
    }
  }
  const Vec block = sum_lanes(sums);
  for (int i = 0; i < kScoreRows; ++i) {
    __builtin_memcpy(scores + i * kTileTokens, reinterpret_cast<const char*>(&block) + 16 * i, 16);
  }
}

/// acc = acc * rescale + weights * values for kRows rows and kVecs registers of the value dimension.
template <int kRows, int kVecs>
FOLIO_INLINE void value_block(const float* weights, const float* rescale, const float* v, int32_t v_stride,
                              int32_t begin, int32_t end, float* acc) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) sums[i][c] = load<Vec>(acc + i * v_stride + c * kLanes) * splat(rescale[i]);
  }
  for (int32_t t = begin; t < end; ++t) {
    Vec values[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) values[c] = load<Vec>(v + t * v_stride + c * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec weight = splat(weights[i * kTileTokens + t]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) sums[i][c] = multiply_add(weight, values[c], sums[i][c]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) store(acc + i * v_stride + c * kLanes, sums[i][c]);
  }
}

/// value_block for any number of registers, over the tokens that one of the rows sees.
template <int kRows>
FOLIO_INLINE void value_rows(const ItemCall& call, int32_t r) {
  const uint64_t* const visible = call.scratch.visible + r;
  uint64_t any = 0;
  for (int i = 0; i < kRows; ++i) any |= visible[i];
  if (any == 0) return;
  const int32_t begin = __builtin_ctzll(any);
  const int32_t end = 64 - __builtin_clzll(any);
  const float* const weights = call.scratch.p + r * kTileTokens;
  float* const acc = call.states.acc + r * call.v_stride;
  int32_t d = 0;
  for (; d + kValueVecs * kLanes <= call.v_stride; d += kValueVecs * kLanes) {
    value_block<kRows, kValueVecs>(weights, call.scratch.rescale + r, call.scratch.v + d, call.v_stride, begin, end,
                                   acc + d);
  }
  for (; d < call.v_stride; d += kLanes) {
    value_block<kRows, 1>(weights, call.scratch.rescale + r, call.scratch.v + d, call.v_stride, begin, end, acc + d);
  }
}

/// The same sums token by token, leaving out those that a row does not see: for tiles with infinite or NaN values, of
/// which 0 times would be NaN.
static inline void value_row_careful(const ItemCall& call, int32_t r) {
  const float* const weights = call.scratch.p + r * kTileTokens;
  float* const acc = call.states.acc + r * call.v_stride;
  const Vec rescale = splat(call.scratch.rescale[r]);
  for (int32_t d = 0; d < call.v_stride; d += kLanes) {
    Vec sum = load<Vec>(acc + d) * rescale;
    for (uint64_t left = call.scratch.visible[r]; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      sum = multiply_add(splat(weights[t]), load<Vec>(call.scratch.v + t * call.v_stride + d), sum);
    }
    store(acc + d, sum);
  }
}

template <DType kType>
static void accumulate_by_tiles(const ItemCall& call) {
  const ItemKeys& keys = call.keys;
  const ItemScratch& scratch = call.scratch;
  for (int32_t first = keys.kv_begin / kTileTokens * kTileTokens; first < keys.kv_end; first += kTileTokens) {
    const Tile tile = tile_at(keys, first);
    uint64_t any = 0;
    uint64_t all = ~uint64_t{0};
    for (int32_t r = 0; r < call.num_rows; ++r) {
      scratch.visible[r] = visible_tokens(call.rows[r], tile);
      any |= scratch.visible[r];
      all &= scratch.visible[r];
    }
    if (any == 0) continue;
    locate_tile(call, {first, __builtin_ctzll(any), kTileTokens - __builtin_clzll(any)});
    convert_keys<kType>(call);
    for (int32_t t = 0; t < kTileTokens; t += 4) {
      for (int32_t r = 0; r < call.num_rows; r += kScoreRows) {
        score_block(scratch.q + r * call.qk_stride, scratch.k + t * call.qk_stride, call.qk_stride,
                    scratch.p + r * kTileTokens + t);
      }
    }
    for (int32_t r = 0; r < call.num_rows; ++r) {
      scratch.rescale[r] =
          scratch.visible[r] == 0 ? 1.0f : softmax_row(call, tile, r, scratch.visible[r], scratch.p + r * kTileTokens);
      if (scratch.visible[r] == 0) __builtin_memset(scratch.p + r * kTileTokens, 0, kTileTokens * sizeof(float));
    }
    if (keys.packed_v) {
      if constexpr (kType != DType::kFloat32) convert_paired_values<kType>(call);
    } else {
      convert_values<kType>(call);
    }
    if (all != ~uint64_t{0} && has_special_values(call)) {
      for (int32_t r = 0; r < call.num_rows; ++r) value_row_careful(call, r);
      continue;
    }
    int32_t r = 0;
    for (; r + 4 <= call.num_rows; r += 4) value_rows<4>(call, r);
    for (; r < call.num_rows; ++r) value_rows<1>(call, r);
  }
}

}  // namespace folio::inline v0::kernels::generic::FOLIO_ISA
