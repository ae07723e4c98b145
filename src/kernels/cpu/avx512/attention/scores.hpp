#pragma once

#include "kernels/cpu/avx512/attention/loads.hpp"
#include "kernels/cpu/avx512/attention/stream.hpp"
#include "kernels/cpu/common/attention/locate.hpp"

/// Products of queries and keys. A score is the lane-wise sum of products over a key's registers, in order, and then
/// the sum over lanes by halves, quarters and so on: the same operations for every shape of block, hence the same bits.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// A block is 16 scores, whose sums over lanes make one register.
inline constexpr int kBlockScores = 16;

/// Lane l of the result = the sum of v[l]'s lanes. Adding two registers after swapping their halves crosswise halves
/// both; additions commute, so that a register's bits do not depend on its place.
FOLIO_INLINE __m512 sum_each(const __m512* v) {
  __m512 eights[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    eights[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, v[i], v[i + 8]),
                              _mm512_shuffle_f32x4(v[i], v[i + 8], _MM_SHUFFLE(1, 0, 3, 2)));
  }
  __m512 fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 crossed = _mm512_mask_blend_ps(0x0f0f, eights[i], eights[i + 4]);
    fours[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, eights[i], eights[i + 4]),
                             _mm512_shuffle_f32x4(crossed, crossed, _MM_SHUFFLE(2, 3, 0, 1)));
  }
  __m512 twos[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    twos[i] = _mm512_add_ps(
        _mm512_mask_blend_ps(0xcccc, fours[i], fours[i + 2]),
        _mm512_castpd_ps(_mm512_shuffle_pd(_mm512_castps_pd(fours[i]), _mm512_castps_pd(fours[i + 2]), 0x55)));
  }
  const __m512 crossed = _mm512_mask_blend_ps(0x5555, twos[0], twos[1]);
  return _mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, twos[0], twos[1]),
                       _mm512_permute_ps(crossed, _MM_SHUFFLE(2, 3, 0, 1)));
}

/// Adds the products of kVecs registers of every token with those of every row.
template <int kRows, int kVecs, typename Key>
FOLIO_INLINE void add_products(const float* q, int32_t q_stride, Key key, __m512 (&sums)[kBlockScores]) {
  constexpr int kTokens = kBlockScores / kRows;
  constexpr int kStep = kTokens < 4 ? kTokens : 4;  // tokens in registers together
#pragma GCC unroll 4
  for (int first = 0; first < kTokens; first += kStep) {
    __m512 keys[kStep][kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kStep; ++j) key(first + j, keys[j]);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const __m512 row = _mm512_loadu_ps(q + i * q_stride + c * kLanes);
#pragma GCC unroll 4
        for (int j = 0; j < kStep; ++j) {
          __m512& sum = sums[i * kTokens + first + j];
          sum = _mm512_fmadd_ps(row, keys[j][c], sum);
        }
      }
    }
  }
}

/// Sums to scores: scores[i * kTileTokens + j] is row i's with token j.
template <int kRows>
FOLIO_INLINE void store_scores(const __m512 (&sums)[kBlockScores], float* scores) {
  constexpr int kTokens = kBlockScores / kRows;
  const __m512 block = sum_each(sums);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    __builtin_memcpy(scores + i * kTileTokens, reinterpret_cast<const char*>(&block) + i * kTokens * 4, kTokens * 4);
  }
}

#define FOLIO_CLEAR_SUMS(sums) \
  __m512 sums[kBlockScores];   \
  _Pragma("GCC unroll 16") for (int clear_ = 0; clear_ < kBlockScores; ++clear_) sums[clear_] = _mm512_setzero_ps()

/// Rows [r, r + kRows) with every token of a tile, the keys converted on the way.
template <DType kType, int kRows>
static void scores_from_stored(const ItemCall& call, int32_t r, const unsigned char* const* k_rows, Stream ahead) {
  constexpr int kTokens = kBlockScores / kRows;
  constexpr int32_t kDims = kKeyDims<kType>;
  constexpr int32_t kBytes = kDims * static_cast<int32_t>(element_bytes(kType));
  const Converter<kType> converter;
  const int32_t chunks = call.head_dim_qk / kDims;
  const int32_t rest = call.head_dim_qk % kDims;
  const int32_t stride = call.scratch.ordered_stride;
  const float* const rows = call.scratch.ordered_q + r * stride;
  for (int32_t t = 0; t < kTileTokens; t += kTokens) {
    for (int j = 0; j < kTokens; ++j) ahead.request(t + j);
    FOLIO_CLEAR_SUMS(sums);
    for (int32_t c = 0; c < chunks; ++c) {
      add_products<kRows, kKeyVecs<kType>>(
          rows + c * kDims, stride,
          [&](int j, __m512* vecs) __attribute__((always_inline)) {
            load_key<kType, false>(converter, k_rows[t + j] + c * kBytes, kDims, vecs);
          },
          sums);
    }
    if (rest != 0) {
      add_products<kRows, kKeyVecs<kType>>(
          rows + chunks * kDims, stride,
          [&](int j, __m512* vecs) __attribute__((always_inline)) {
            load_key<kType, true>(converter, k_rows[t + j] + chunks * kBytes, rest, vecs);
          },
          sums);
    }
    store_scores<kRows>(sums, call.scratch.p + r * kTileTokens + t);
  }
}

/// All rows with every token of a tile, 16 keys at a time converted for all rows.
template <DType kType>
static void scores_from_converted(const ItemCall& call, const unsigned char* const* k_rows, Stream ahead) {
  constexpr int kTokens = kConvertedKeys;
  constexpr int kRows = 4;
  constexpr int32_t kDims = kKeyDims<kType>;
  constexpr int32_t kBytes = kDims * static_cast<int32_t>(element_bytes(kType));
  const Converter<kType> converter;
  const int32_t stride = call.scratch.ordered_stride;
  const int32_t used = (call.head_dim_qk + kDims - 1) / kDims * kDims;
  float* const keys = call.scratch.k;
  for (int32_t t = 0; t < kTileTokens; t += kTokens) {
    for (int32_t j = 0; j < kTokens; ++j) {
      ahead.request(t + j);
      for (int32_t d = 0; d < call.head_dim_qk; d += kDims) {
        __m512 vecs[kKeyVecs<kType>];
        const unsigned char* const from = k_rows[t + j] + d / kDims * kBytes;
        const int32_t count = call.head_dim_qk - d;
        if (count >= kDims) {
          load_key<kType, false>(converter, from, kDims, vecs);
        } else {
          load_key<kType, true>(converter, from, count, vecs);
        }
#pragma GCC unroll 4
        for (int c = 0; c < kKeyVecs<kType>; ++c) _mm512_storeu_ps(keys + j * stride + d + c * kLanes, vecs[c]);
      }
    }
    for (int32_t r = 0; r < call.num_rows; r += kRows) {
      for (int32_t j = 0; j < kTokens; j += kBlockScores / kRows) {
        FOLIO_CLEAR_SUMS(sums);
        for (int32_t d = 0; d < used; d += kLanes) {
          add_products<kRows, 1>(
              call.scratch.ordered_q + r * stride + d, stride,
              [&](int i, __m512* vecs)
                  __attribute__((always_inline)) { vecs[0] = _mm512_loadu_ps(keys + (j + i) * stride + d); },
              sums);
        }
        store_scores<kRows>(sums, call.scratch.p + r * kTileTokens + t + j);
      }
    }
  }
}

#undef FOLIO_CLEAR_SUMS

/// The queries in the order in which load_key gives components, with zeros for those that keys do not have.
template <DType kType>
static void order_queries(const ItemCall& call) {
  constexpr int32_t kDims = kKeyDims<kType>;
  for (int32_t r = 0; r < padded_rows(call.num_rows); ++r) {
    const float* const q = call.scratch.q + r * call.qk_stride;
    float* const ordered = call.scratch.ordered_q + r * call.scratch.ordered_stride;
    for (int32_t first = 0; first < call.head_dim_qk; first += kDims) {
      for (int32_t i = 0; i < kDims; ++i) {
        const int32_t d = first + key_component<kType>(i / kLanes, i % kLanes);
        ordered[first + i] = d < call.head_dim_qk ? q[d] : 0.0f;
      }
    }
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
