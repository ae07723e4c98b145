#pragma once

#include "kernels/cpu/common/gemm.hpp"
#include "kernels/cpu/common/producer.hpp"

#if defined(FOLIO_VEC_BFMMLA)

/// GEMM0 by BFMMLA: S = Q K^T with bfloat16 K as it lies in the cache, whatever the number of rows.
///
/// BFMMLA multiplies two rows of 4 bfloat16 with two others, and adds to 2 x 2 floats. Of every 8 components the lower
/// 4 go to one sum, the upper 4 to another. A score is both together.
///
///     rows r, r + 1 with tokens t, t + 1      (Q_r lower, Q_r+1 lower) x (K_t lower, K_t+1 lower)  ->  2 x 2 sums
///                                             (Q_r upper, Q_r+1 upper) x (K_t upper, K_t+1 upper)  ->  2 x 2 sums
///     row r alone with token t                (K_t lower, K_t upper)   x (Q_r lower, Q_r upper)    ->  its two sums
///                                                               on the diagonal; what is beside it has no meaning
///
/// Pairs of rows want K interleaved, by ZIP1 and ZIP2 for every two tokens. A row alone takes K as it lies. Both do the
/// same operations: a row's bits do not depend on the rows beside it.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

static_assert(kLanes == 4);
inline constexpr int32_t kMmaDims = 8;  ///< components of a register of bfloat16; head dimensions are multiples

/// The lower halves of two registers, and the upper ones.
template <typename Register>
FOLIO_INLINE Register interleave_lower(Register a, Register b) {
  const Vec first = reinterpret_cast<Vec>(a);
  const Vec second = reinterpret_cast<Vec>(b);
  return reinterpret_cast<Register>(FOLIO_SHUFFLE(first, second, 0, 1, 4, 5));
}
template <typename Register>
FOLIO_INLINE Register interleave_upper(Register a, Register b) {
  const Vec first = reinterpret_cast<Vec>(a);
  const Vec second = reinterpret_cast<Vec>(b);
  return reinterpret_cast<Register>(FOLIO_SHUFFLE(first, second, 2, 3, 6, 7));
}

/// Packed Q from row r on, which is even.
FOLIO_INLINE uint16_t* packed_q(const WorkTileParams& work, int32_t r) {
  return reinterpret_cast<uint16_t*>(work.scratch.reordered_q + r * work.scratch.reordered_stride);
}

/// Blocks have 8 or 4 rows, as long as more than 6 or 2 are left, then 2 or 1.
FOLIO_INLINE bool last_row_is_alone(int32_t num_rows) {
  return num_rows % 4 == 1;
}

/// Q as bfloat16, which it is by type: the lower half of each float is 0. Two rows lie together: of every 8 components
/// the lower 4 of both, then the upper 4 of both. A row alone stays as it is.
static inline void pack_q(const WorkTileParams& work) {
  const int32_t in_pairs = last_row_is_alone(work.num_rows) ? work.num_rows - 1 : (work.num_rows + 1) / 2 * 2;
  for (int32_t r = 0; r < larger(in_pairs, work.num_rows); ++r) {
    const float* const q = work.scratch.q + r * work.qk_stride;
    uint16_t* const packed = r < in_pairs ? packed_q(work, r / 2 * 2) + r % 2 * kLanes : packed_q(work, r);
    const int32_t step = r < in_pairs ? 2 : 1;
    for (int32_t d = 0; d < work.qk_stride; d += kLanes) {
      store(packed + step * d, low_halves(bits(load<Vec>(q + d)) >> 16));
    }
  }
}

/// Tokens of a block of kRows rows. 4 and 8 rows then have 16 registers of sums, fewer rows 8.
template <int kRows>
inline constexpr int kMmaTokens = kRows == 8 ? 4 : 8;

/// Rows [r, r + kRows), two or more, with kMmaTokens tokens.
template <int kRows>
FOLIO_INLINE void qk_block_bf16(const WorkTileParams& work, int32_t r, const unsigned char* const* k, float* scores) {
  constexpr int kTokens = kMmaTokens<kRows>;
  const uint16_t* const q = packed_q(work, r);
  const int32_t q_stride = 4 * work.scratch.reordered_stride;  // from a pair of rows to the next
  Vec lower[kRows / 2][kTokens / 2] = {};
  Vec upper[kRows / 2][kTokens / 2] = {};
  for (int32_t d = 0; d < work.head_dim_qk; d += kMmaDims) {
    Bf16Vec q_lower[kRows / 2];
    Bf16Vec q_upper[kRows / 2];
#pragma GCC unroll 4
    for (int i = 0; i < kRows / 2; ++i) {
      q_lower[i] = load<Bf16Vec>(q + i * q_stride + 2 * d);
      q_upper[i] = load<Bf16Vec>(q + i * q_stride + 2 * d + kMmaDims);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kTokens / 2; ++j) {
      const auto first = load<Bf16Vec>(k[2 * j] + 2 * d);
      const auto second = load<Bf16Vec>(k[2 * j + 1] + 2 * d);
      const Bf16Vec k_lower = interleave_lower(first, second);
      const Bf16Vec k_upper = interleave_upper(first, second);
#pragma GCC unroll 4
      for (int i = 0; i < kRows / 2; ++i) {
        lower[i][j] = multiply_add_2x2(q_lower[i], k_lower, lower[i][j]);
        upper[i][j] = multiply_add_2x2(q_upper[i], k_upper, upper[i][j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows / 2; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kTokens / 2; j += 2) {
      const Vec a = lower[i][j] + upper[i][j];
      const Vec b = lower[i][j + 1] + upper[i][j + 1];
      store(scores + 2 * i * kTileTokens + 2 * j, interleave_lower(a, b));
      store(scores + (2 * i + 1) * kTileTokens + 2 * j, interleave_upper(a, b));
    }
  }
}

/// Row r alone with kMmaTokens tokens.
FOLIO_INLINE void qk_block_bf16_alone(const WorkTileParams& work, int32_t r, const unsigned char* const* k,
                                      float* scores) {
  constexpr int kTokens = kMmaTokens<1>;
  const uint16_t* const q = packed_q(work, r);
  Vec sums[kTokens] = {};
  for (int32_t d = 0; d < work.head_dim_qk; d += kMmaDims) {
    const auto row = load<Bf16Vec>(q + d);
#pragma GCC unroll 8
    for (int j = 0; j < kTokens; ++j) sums[j] = multiply_add_2x2(load<Bf16Vec>(k[j] + 2 * d), row, sums[j]);
  }
#pragma GCC unroll 2
  for (int j = 0; j < kTokens; j += 4) {  // lanes 0 and 3 of each
    const Vec* const four = sums + j;
    const Vec lower =
        interleave_lower(FOLIO_SHUFFLE(four[0], four[1], 0, 4, 1, 5), FOLIO_SHUFFLE(four[2], four[3], 0, 4, 1, 5));
    const Vec upper =
        interleave_upper(FOLIO_SHUFFLE(four[0], four[1], 2, 6, 3, 7), FOLIO_SHUFFLE(four[2], four[3], 2, 6, 3, 7));
    store(scores + j, lower + upper);
  }
}

/// Rows [r, r + kRows) with every token of a KV tile. Inside the mainloop, gcc loads addresses in the inner loop.
template <int kRows>
__attribute__((noinline)) static void qk_rows_bf16(const WorkTileParams& work, int32_t r,
                                                   const unsigned char* const* k_rows, const Prefetch& prefetch) {
  constexpr int kTokens = kMmaTokens<kRows>;
  for (int32_t t = 0; t < kTileTokens; t += kTokens) {
    for (int32_t j = 0; j < kTokens; ++j) prefetch.issue(t + j);
    float* const scores = work.scratch.p + r * kTileTokens + t;
    if constexpr (kRows == 1) {
      qk_block_bf16_alone(work, r, k_rows + t, scores);
    } else {
      qk_block_bf16<kRows>(work, r, k_rows + t, scores);
    }
  }
}

FOLIO_INLINE void gemm_qk_bf16(const WorkTileParams& work, const unsigned char* const* k, const Prefetch& prefetch) {
  int32_t r = 0;
  Prefetch once = prefetch;
  for (; work.num_rows - r > 6; r += 8, once = {}) qk_rows_bf16<8>(work, r, k, once);
  for (; work.num_rows - r > 2; r += 4, once = {}) qk_rows_bf16<4>(work, r, k, once);
  if (work.num_rows - r == 2) qk_rows_bf16<2>(work, r, k, once);
  if (work.num_rows - r == 1) qk_rows_bf16<1>(work, r, k, once);
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA

#endif  // FOLIO_VEC_BFMMLA
