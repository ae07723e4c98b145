#pragma once

#include "kernels/cpu/avx512/attention/loads.hpp"
#include "kernels/cpu/avx512/attention/stream.hpp"
#include "kernels/cpu/common/attention/locate.hpp"

/// Products of queries and keys. A score is the lane-wise sum of products over a key's registers, in order, and then
/// the sum over lanes by halves, quarters and so on: the same operations for every shape of block, hence the same bits.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// So many rows read keys and values straight from the cache; more share conversions.
inline constexpr int32_t kFewRows = 8;

/// A block is 16 scores, whose sums over lanes make one register.
inline constexpr int kBlockScores = 16;

/// Lane l of the result = the sum of v[l]'s lanes. Each step adds the halves of pairs of registers, and the halves of
/// those and so on; additions commute, so that a register's bits do not depend on its place.
FOLIO_INLINE __m512 sum_each(const __m512* v) {
  __m512 eights[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = v[i + i / 4 * 4];
    const __m512 b = v[i + i / 4 * 4 + 4];
    eights[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(1, 0, 3, 2)));
  }
  __m512 fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(eights[i], eights[i + 4], _MM_SHUFFLE(2, 0, 2, 0)),
                             _mm512_shuffle_f32x4(eights[i], eights[i + 4], _MM_SHUFFLE(3, 1, 3, 1)));
  }
  __m512 twos[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(fours[2 * i]);
    const __m512d b = _mm512_castps_pd(fours[2 * i + 1]);
    twos[i] = _mm512_castpd_ps(_mm512_mask_blend_pd(0xaa, a, b));
    twos[i] = _mm512_add_ps(twos[i], _mm512_castpd_ps(_mm512_shuffle_pd(a, b, 0x55)));
  }
  return _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], _MM_SHUFFLE(2, 0, 2, 0)),
                       _mm512_shuffle_ps(twos[0], twos[1], _MM_SHUFFLE(3, 1, 3, 1)));
}

/// sum + row * key, lane by lane; with kDot each lane adds the products of two bfloat16.
template <bool kDot>
FOLIO_INLINE __m512 add_product(__m512 sum, __m512i row, __m512i key) {
  if constexpr (kDot) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(row), reinterpret_cast<__m512bh>(key));
#endif
  } else {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(row), _mm512_castsi512_ps(key), sum);
  }
}

/// Adds the products of kVecs registers of every token with those of every row, which are `stride` bytes apart.
template <bool kDot, int kRows, int kVecs, typename Key>
FOLIO_INLINE void add_products(const unsigned char* rows, int64_t stride, Key key, __m512 (&sums)[kBlockScores]) {
  constexpr int kTokens = kBlockScores / kRows;
  constexpr int kStep = kTokens < 4 ? kTokens : 4;  // tokens in registers together
#pragma GCC unroll 4
  for (int first = 0; first < kTokens; first += kStep) {
    __m512i keys[kStep][kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kStep; ++j) key(first + j, keys[j]);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const __m512i row = in_register(_mm512_loadu_si512(rows + i * stride + 64 * c));
#pragma GCC unroll 4
        for (int j = 0; j < kStep; ++j) {
          __m512& sum = sums[i * kTokens + first + j];
          sum = add_product<kDot>(sum, row, keys[j][c]);
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

/// The queries that keys are multiplied with: bytes of row r.
FOLIO_INLINE const unsigned char* ordered_row(const ItemCall& call, int32_t r) {
  return reinterpret_cast<const unsigned char*>(call.scratch.ordered_q + r * call.scratch.ordered_stride);
}

/// Rows [r, r + kRows) with every token of a tile, the keys converted on the way.
template <DType kType, bool kDot, int kRows>
static void scores_from_stored(const ItemCall& call, int32_t r, const unsigned char* const* k_rows, Stream ahead) {
  constexpr int kTokens = kBlockScores / kRows;
  constexpr int kVecs = kKeyVecs<kType, kDot>;
  constexpr int32_t kDims = kKeyDims<kType>;
  constexpr int32_t kBytes = kDims * static_cast<int32_t>(element_bytes(kType));
  const Converter<kType> converter;
  const int32_t chunks = call.head_dim_qk / kDims;
  const int32_t rest = call.head_dim_qk % kDims;
  const int64_t stride = int64_t{4} * call.scratch.ordered_stride;
  const unsigned char* const rows = ordered_row(call, r);
  for (int32_t t = 0; t < kTileTokens; t += kTokens) {
    for (int j = 0; j < kTokens; ++j) ahead.request(t + j);
    FOLIO_CLEAR_SUMS(sums);
    for (int32_t c = 0; c < chunks; ++c) {
      add_products<kDot, kRows, kVecs>(
          rows + c * kVecs * 64, stride,
          [&](int j, __m512i* vecs) __attribute__((always_inline)) {
            load_key<kType, kDot, false>(converter, k_rows[t + j] + c * kBytes, kDims, vecs);
          },
          sums);
    }
    if (rest != 0) {
      add_products<kDot, kRows, kVecs>(
          rows + chunks * kVecs * 64, stride,
          [&](int j, __m512i* vecs) __attribute__((always_inline)) {
            load_key<kType, kDot, true>(converter, k_rows[t + j] + chunks * kBytes, rest, vecs);
          },
          sums);
    }
    store_scores<kRows>(sums, call.scratch.p + r * kTileTokens + t);
  }
}

/// A key as registers in memory. Returns how many.
template <DType kType, bool kDot>
FOLIO_INLINE int32_t convert_key(const Converter<kType>& converter, const unsigned char* from, int32_t dim,
                                 unsigned char* to) {
  constexpr int kVecs = kKeyVecs<kType, kDot>;
  constexpr int32_t kDims = kKeyDims<kType>;
  int32_t count = 0;
  for (int32_t d = 0; d < dim; d += kDims, from += kDims * element_bytes(kType)) {
    __m512i vecs[kVecs];
    if (dim - d >= kDims) {
      load_key<kType, kDot, false>(converter, from, kDims, vecs);
    } else {
      load_key<kType, kDot, true>(converter, from, dim - d, vecs);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) _mm512_storeu_si512(to + 64 * count++, vecs[c]);
  }
  return count;
}

/// All rows with every token of a tile, 16 keys at a time converted for all rows.
template <DType kType, bool kDot>
static void scores_from_converted(const ItemCall& call, const unsigned char* const* k_rows, Stream ahead) {
  constexpr int kRows = 4;
  const Converter<kType> converter;
  const int64_t stride = int64_t{4} * call.scratch.ordered_stride;
  auto* const keys = reinterpret_cast<unsigned char*>(call.scratch.k);
  for (int32_t t = 0; t < kTileTokens; t += kConvertedKeys) {
    int32_t vecs = 0;
    for (int32_t j = 0; j < kConvertedKeys; ++j) {
      ahead.request(t + j);
      vecs = convert_key<kType, kDot>(converter, k_rows[t + j], call.head_dim_qk, keys + j * stride);
    }
    for (int32_t r = 0; r < call.num_rows; r += kRows) {
      for (int32_t j = 0; j < kConvertedKeys; j += kBlockScores / kRows) {
        FOLIO_CLEAR_SUMS(sums);
        for (int32_t c = 0; c < vecs; ++c) {
          add_products<kDot, kRows, 1>(
              ordered_row(call, r) + 64 * c, stride,
              [&](int i, __m512i* key) __attribute__((always_inline)) {
                key[0] = in_register(_mm512_loadu_si512(keys + (j + i) * stride + 64 * c));
              },
              sums);
        }
        store_scores<kRows>(sums, call.scratch.p + r * kTileTokens + t + j);
      }
    }
  }
}

#undef FOLIO_CLEAR_SUMS

/// The queries in the order in which load_key gives components, with zeros for those that keys do not have. With kDot
/// they are bfloat16 by type, whose lower half is 0 as a float.
template <DType kType, bool kDot>
static void order_queries(const ItemCall& call) {
  constexpr int32_t kDims = kKeyDims<kType>;
  for (int32_t r = 0; r < padded_rows(call.num_rows); ++r) {
    const float* const q = call.scratch.q + r * call.qk_stride;
    float* const ordered = call.scratch.ordered_q + r * call.scratch.ordered_stride;
    for (int32_t first = 0; first < call.head_dim_qk; first += kDims) {
      for (int32_t i = 0; i < kDims; ++i) {
        const int32_t d = first + key_component<kType, kDot>(i);
        const float component = d < call.head_dim_qk ? q[d] : 0.0f;
        if constexpr (kDot) {
          const auto* const half = reinterpret_cast<const unsigned char*>(&component) + 2;
          __builtin_memcpy(reinterpret_cast<unsigned char*>(ordered) + 2 * (first + i), half, 2);
        } else {
          ordered[first + i] = component;
        }
      }
    }
  }
}

/// The scores of a tile, into scratch.p.
template <DType kType, bool kDot>
FOLIO_INLINE void make_scores(const ItemCall& call, const unsigned char* const* k, const Stream& ahead) {
  constexpr bool kNothingToConvert = kType == DType::kBFloat16 && kDot;
  if (call.num_rows > kFewRows && !kNothingToConvert) return scores_from_converted<kType, kDot>(call, k, ahead);
  const int32_t parts = (call.num_rows + 3) / 4;
  int32_t r = 0;
  for (; call.num_rows - r > 2; r += 4) {
    scores_from_stored<kType, kDot, 4>(call, r, k, ahead.part(r / 4, parts));
  }
  if (call.num_rows - r == 2) scores_from_stored<kType, kDot, 2>(call, r, k, ahead.part(r / 4, parts));
  if (call.num_rows - r == 1) scores_from_stored<kType, kDot, 1>(call, r, k, ahead.part(r / 4, parts));
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
