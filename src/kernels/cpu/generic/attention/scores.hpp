#pragma once

#include "kernels/cpu/common/attention/prefetch.hpp"
#include "kernels/cpu/generic/attention/rotate.hpp"

/// Products of queries and keys. A score is the sum over registers of the dimension, in order, of lane-wise products,
/// and then over the lanes as sum_lanes adds them: the same operations for every shape of block below, hence the same
/// bits.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// kRows rows and kLanes / kRows tokens at a time make one register of scores.
template <int kRows>
inline constexpr int kScoreTokens = kLanes / kRows;

/// Scores of one block. key(token, d) gives kLanes components of a key from d on, as floats; `dim` is the padded
/// dimension. scores[i * kTileTokens + j] is row i's with token j.
template <int kRows, typename Key>
FOLIO_INLINE void score_block(const float* q, int32_t q_stride, int32_t dim, Key key, float* scores) {
  constexpr int kTokens = kScoreTokens<kRows>;
  constexpr int kStep = kTokens < 4 ? kTokens : 4;  // tokens whose sums are in registers together
  Vec sums[kLanes];
#pragma GCC unroll 16
  for (int first = 0; first < kTokens; first += kStep) {
    Vec part[kRows][kStep] = {};
    for (int32_t d = 0; d < dim; d += kLanes) {
      Vec rows[kRows];
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) rows[i] = load<Vec>(q + i * q_stride + d);
#pragma GCC unroll 4
      for (int j = 0; j < kStep; ++j) {
        const Vec token = key(first + j, d);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) part[i][j] = multiply_add(rows[i], token, part[i][j]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kStep; ++j) {
        const int lane = i * kTokens + first + j;
        sums[kLanes / 4 * (lane % 4) + lane / 4] = part[i][j];
      }
    }
  }
  const Vec block = sum_lanes(sums);
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    __builtin_memcpy(scores + i * kTileTokens, reinterpret_cast<const char*>(&block) + i * kTokens * 4, kTokens * 4);
  }
}

/// Rows [r, r + kRows) with every token of a tile, the keys converted on the way. `ahead` is asked for meanwhile.
template <DType kType, int kRows>
static void scores_from_stored(const ItemCall& call, int32_t r, const unsigned char* const* k_rows,
                               const Stream& ahead) {
  constexpr int kTokens = kScoreTokens<kRows>;
  const int32_t whole = call.head_dim_qk / kLanes * kLanes;
  const int32_t padded = (call.head_dim_qk + kLanes - 1) / kLanes * kLanes;
  for (int32_t t = 0; t < kTileTokens; t += kTokens) {
    for (int32_t j = 0; j < kTokens; ++j) ahead.request(t + j, 0, 1);
    const unsigned char* const* const rows = k_rows + t;
    const float* const q = call.scratch.q + r * call.qk_stride;
    float* const scores = call.scratch.p + r * kTileTokens + t;
    if (whole == padded) {
      score_block<kRows>(
          q, call.qk_stride, padded,
          [&](int j, int32_t d)
              __attribute__((always_inline)) { return load_elements<kType>(rows[j] + d * element_bytes(kType)); },
          scores);
    } else {
      score_block<kRows>(
          q, call.qk_stride, padded,
          [&](int j, int32_t d) __attribute__((always_inline)) {
            const unsigned char* const at = rows[j] + d * element_bytes(kType);
            return d < whole ? load_elements<kType>(at) : load_some<kType>(at, call.head_dim_qk - d);
          },
          scores);
    }
  }
}

inline constexpr int kBlockRows = kLanes / 4;  ///< rows of a block of 4 tokens

/// All rows with every token of a tile, whose first is local token `first`: four keys at a time are converted, and
/// turned where there is a rotary embedding, for all rows.
template <DType kType>
static void scores_by_fours(const ItemCall& call, int32_t first, const unsigned char* const* k_rows,
                            const Stream& ahead) {
  float* const k = call.scratch.k;
  const int32_t stride = call.qk_stride;
  for (int32_t t = 0; t < kTileTokens; t += 4) {
    for (int32_t j = 0; j < 4; ++j) {
      ahead.request(t + j, 0, 1);
      convert_row<kType>(k_rows[t + j], call.head_dim_qk, k + j * stride);
      if (call.rope != nullptr) rotate(call, key_position(call.keys, int64_t{first} + t + j), k + j * stride);
    }
    for (int32_t r = 0; r < call.num_rows; r += kBlockRows) {
      score_block<kBlockRows>(
          call.scratch.q + r * stride, stride,
          stride, [&](int j, int32_t d) __attribute__((always_inline)) { return load<Vec>(k + j * stride + d); },
          call.scratch.p + r * kTileTokens + t);
    }
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
