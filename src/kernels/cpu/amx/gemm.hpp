#pragma once

#include "kernels/cpu/amx/kv_pipeline.hpp"

/// GEMM0 (S^T = K Q^T) and GEMM1 (O += P V).
///
/// GEMM0 is transposed: K as stored is the left operand, packed Q the right one. So a token's scores stand side by
/// side, a row in each lane. In GEMM1, P is the left operand, and V in pairs of tokens (VNNI layout, as packed pages
/// store it) the right one.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// The MMAs of GEMM0: one for every 32 components. Of float16 four: both terms of K by both of Q.
struct QkSteps {
  int32_t dims;   ///< head_dim_qk / 32
  int32_t count;  ///< of MMAs
  /// The 64 bytes of a K row, and the tile of a row block's packed Q, that step i multiplies.
  FOLIO_INLINE_MEMBER int32_t k(int32_t i) const { return count == dims ? i : (i & 2) / 2 * dims + i / 4; }
  FOLIO_INLINE_MEMBER int32_t q(int32_t i) const { return count == dims ? i : (i & 1) * dims + i / 4; }
  FOLIO_INLINE_MEMBER int32_t q_tiles() const { return count == dims ? dims : 2 * dims; }  ///< of a row block
};

FOLIO_INLINE QkSteps qk_steps(const WorkTileParams& work) {
  const int32_t dims = rounded_up(work.head_dim_qk, kMmaDims) / kMmaDims;
  return {dims, work.q_dtype == DType::kFloat16 ? 4 * dims : dims};
}

/// scores[token][lane] of the row blocks whose packed Q begins at `q`; row block b at scores + b * kTileTokens *
/// kRowBlock.
template <class Tiles, int kRowBlocks, class Pipeline>
FOLIO_INLINE void gemm_qk(const unsigned char* q, QkSteps steps, const TileOperands& operands, float* scores,
                          Pipeline& pipeline) {
  const TileSource* const k = operands.keys;
  if constexpr (kRowBlocks == 1) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (int32_t i = 0; i < steps.count; ++i) {
      const int32_t at = steps.k(i);
      pipeline.consumer_wait_k(at);
      Tiles::template load<5>(q + steps.q(i) * kTileBytes, kTileRowBytes);
      Tiles::template load<4>(pipeline.k_operand(k, 0, at), k[0].stride);
      Tiles::template multiply_add<0, 4, 5>();
      pipeline.at_mma();
      Tiles::template load<6>(pipeline.k_operand(k, 1, at), k[1].stride);
      Tiles::template multiply_add<1, 6, 5>();
      pipeline.at_mma();
      Tiles::template load<7>(pipeline.k_operand(k, 2, at), k[2].stride);
      Tiles::template multiply_add<2, 7, 5>();
      pipeline.at_mma();
      Tiles::template load<4>(pipeline.k_operand(k, 3, at), k[3].stride);
      Tiles::template multiply_add<3, 4, 5>();
      pipeline.at_mma();
    }
    Tiles::template store<0>(scores, kTileRowBytes);
    Tiles::template store<1>(scores + 16 * kRowBlock, kTileRowBytes);
    Tiles::template store<2>(scores + 32 * kRowBlock, kTileRowBytes);
    Tiles::template store<3>(scores + 48 * kRowBlock, kTileRowBytes);
  } else {
    const unsigned char* const other_q = q + steps.q_tiles() * kTileBytes;
    float* const other_scores = scores + kTileTokens * kRowBlock;
    for (int32_t g = 0; g < kTileTokens / kGroupTokens; g += 2) {
      Tiles::template zero<0>();
      Tiles::template zero<1>();
      Tiles::template zero<2>();
      Tiles::template zero<3>();
      for (int32_t i = 0; i < steps.count; ++i) {
        const int64_t k_at = steps.k(i);
        const int64_t q_at = steps.q(i) * kTileBytes;
        Tiles::template load_streaming<4>(k[g].at + k_at * k[g].step, k[g].stride);
        Tiles::template load<6>(q + q_at, kTileRowBytes);
        Tiles::template multiply_add<0, 4, 6>();
        Tiles::template load<7>(other_q + q_at, kTileRowBytes);
        Tiles::template multiply_add<1, 4, 7>();
        pipeline.at_mma();
        Tiles::template load_streaming<5>(k[g + 1].at + k_at * k[g + 1].step, k[g + 1].stride);
        Tiles::template multiply_add<2, 5, 6>();
        Tiles::template multiply_add<3, 5, 7>();
        pipeline.at_mma();
      }
      const int32_t first = g * kGroupTokens * kRowBlock;
      Tiles::template store<0>(scores + first, kTileRowBytes);
      Tiles::template store<1>(other_scores + first, kTileRowBytes);
      Tiles::template store<2>(scores + first + kGroupTokens * kRowBlock, kTileRowBytes);
      Tiles::template store<3>(other_scores + first + kGroupTokens * kRowBlock, kTileRowBytes);
    }
  }
}

/// KV tiles of a batch whose P is ready and whose GEMM1 is still to be issued.
struct PendingPv {
  const TileOperands* tiles[kBatchTiles];
  const uint16_t* p[kBatchTiles];  ///< [term][row block][half][kRowBlock][kHalfTokens]
  int32_t count = 0;
};

template <class Tiles, int kFrom, int kCount>
FOLIO_INLINE void load_acc(const float* acc, int64_t stride) {
  if constexpr (kCount > 0) {
    Tiles::template load<kFrom>(acc, stride);
    load_acc<Tiles, kFrom + 1, kCount - 1>(acc + kDimTile, stride);
  }
}

template <class Tiles, int kFrom, int kCount>
FOLIO_INLINE void store_acc(float* acc, int64_t stride) {
  if constexpr (kCount > 0) {
    Tiles::template store<kFrom>(acc, stride);
    store_acc<Tiles, kFrom + 1, kCount - 1>(acc + kDimTile, stride);
  }
}

template <class Tiles, int kRowBlocks, int kDims, int kDim, class Pipeline>
FOLIO_INLINE void mma_dim_tiles(const unsigned char* values, const TileSource& source, Pipeline& pipeline) {
  if constexpr (kDim < kDims) {
    constexpr int kValues = 6 + kDim % 2;
    const unsigned char* const from = values + kDim * source.step;
    if constexpr (kRowBlocks == 2) {
      Tiles::template load_streaming<kValues>(from, source.stride);
    } else {
      Tiles::template load<kValues>(from, source.stride);
    }
    Tiles::template multiply_add<kDim, 4, kValues>();
    if constexpr (kRowBlocks == 2) Tiles::template multiply_add<kDims + kDim, 5, kValues>();
    pipeline.at_mma();
    mma_dim_tiles<Tiles, kRowBlocks, kDims, kDim + 1>(values, source, pipeline);
  }
}

/// The MMAs of GEMM1: one, or of float16 three. That of both low terms is left out: it is below 2^-16 of p v.
struct PvProducts {
  int32_t count;
  int64_t low_values;  ///< bytes from V's high terms to the low ones
  /// high P by high V, high P by low V, low P by high V
  FOLIO_INLINE_MEMBER int64_t v(int32_t i) const { return i == 1 ? low_values : 0; }
  FOLIO_INLINE_MEMBER int64_t p(int32_t i) const { return i == 2 ? kTermP : 0; }
};

inline constexpr int32_t kMaxPvProducts = 3;

FOLIO_INLINE PvProducts pv_products(const WorkTileParams& work) {
  return {work.q_dtype == DType::kFloat16 ? kMaxPvProducts : 1, low_value_bytes(work.head_dim_v)};
}

/// GEMM1 of kDims dimension tiles, from tile `d` on: acc stays in TMM0 to TMM3 over all pending KV tiles.
template <class Tiles, int kRowBlocks, int kDims, class Pipeline>
FOLIO_INLINE void pv_dim_tiles(float* acc, int32_t v_stride, int32_t d, const PendingPv& pending, PvProducts products,
                               Pipeline& pipeline) {
  const int64_t stride = int64_t{v_stride} * 4;
  float* const acc_tile = acc + d * kDimTile;
  pipeline.consumer_wait_v(d);
  load_acc<Tiles, 0, kDims>(acc_tile, stride);
  if constexpr (kRowBlocks == 2) load_acc<Tiles, kDims, kDims>(acc_tile + kRowBlock * v_stride, stride);
  for (int32_t i = 0; i < pending.count; ++i) {
    for (int32_t h = 0; h < kTileTokens / kHalfTokens; ++h) {
      const TileSource& values = pending.tiles[i]->values[h];
      if (values.at == nullptr) continue;
      const unsigned char* const v = pipeline.v_operand(pending.tiles[i]->values, h, d);
      for (int32_t j = 0; j < products.count; ++j) {
        const uint16_t* const p = pending.p[i] + h * kHalfP + products.p(j);
        Tiles::template load<4>(p, kTileRowBytes);
        if constexpr (kRowBlocks == 2) Tiles::template load<5>(p + kRowBlockP, kTileRowBytes);
        mma_dim_tiles<Tiles, kRowBlocks, kDims, 0>(v + products.v(j), values, pipeline);
      }
    }
  }
  store_acc<Tiles, 0, kDims>(acc_tile, stride);
  if constexpr (kRowBlocks == 2) store_acc<Tiles, kDims, kDims>(acc_tile + kRowBlock * v_stride, stride);
}

FOLIO_INLINE float bfloat16_value(uint16_t code) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(code) << 16);
}

/// Element `i` of a row as bfloat16, if it is NaN or infinite.
FOLIO_INLINE uint16_t non_finite_element(const KvOperand& kv, const unsigned char* from, int32_t i) {
  const uint16_t code = element16(kv, from, i);
  if (!holds_float16(kv)) return code;
  if ((code & 0x7c00) != 0x7c00) return 0;
  return static_cast<uint16_t>((code & 0x8000) | ((code & 0x3ff) != 0 ? 0x7fc0 : 0x7f80));
}

/// Scores of float16 keys with NaN or infinite components. GEMM0's sums are NaN there: an infinity meets low terms of
/// Q that are 0.
static inline void rescore_non_finite(const WorkTileParams& work, const TileOperands& operands, int32_t r, int32_t rows,
                                      float* scores) {
  for (uint64_t left = operands.non_finite_keys; left != 0; left &= left - 1) {
    const int32_t t = __builtin_ctzll(left);
    const unsigned char* const key = key_at(work.kv, operands.tile.first + t);
    for (int32_t i = 0; i < rows; ++i) {
      Vec sum{};
      for (int32_t d = 0; d < work.head_dim_qk; d += kLanes) {
        const int32_t dims = smaller(work.head_dim_qk - d, kLanes);
        const auto some = [&](const unsigned char* row) __attribute__((always_inline)) {
          return load_some<DType::kFloat16>(row + d * 2, dims);
        };
        sum = multiply_add(some(work.rows[r + i].q), some(key), sum);
      }
      float score = 0.0f;
      for (int32_t lane = 0; lane < kLanes; ++lane) score += sum[lane];
      scores[t * kRowBlock + i] = score;
    }
  }
}

/// Adds the non-finite components, which GEMM1 had as zeros, to the rows that they are visible to. The sum is infinite
/// or NaN in any order.
static inline void add_non_finite(const WorkTileParams& work, int32_t r, int32_t rows, const TileOperands& operands,
                                  const uint16_t* p) {
  const KvOperand& kv = work.kv;
  const int32_t step = kv.packed_v ? 2 : 1;
  for (uint64_t left = operands.non_finite; left != 0; left &= left - 1) {
    const int32_t t = __builtin_ctzll(left);
    const int32_t local = operands.tile.first + t;
    const unsigned char* const from = value_at(kv, local) + (kv.packed_v ? local % 2 * element_bytes(kv) : 0);
    for (int32_t i = 0; i < rows; ++i) {
      if (!operands.uniform && (operands.visible[r + i] >> t & 1) == 0) continue;
      const int32_t b = i / kRowBlock;
      const uint16_t p_t = p[b * kRowBlockP + t / kHalfTokens * kHalfP + i % kRowBlock * kHalfTokens + t % kHalfTokens];
      float* const acc = work.state.acc + (r + i) * work.v_stride;
      for (int32_t d = 0; d < work.head_dim_v; ++d) {
        const uint16_t code = non_finite_element(kv, from, d * step);
        if ((code & 0x7f80) == 0x7f80) acc[d] += bfloat16_value(p_t) * bfloat16_value(code);
      }
    }
  }
}

/// What GEMM1 of all pending KV tiles ends with: their non-finite components. Clears `pending`.
template <int kRowBlocks>
FOLIO_INLINE void end_pending_pv(const WorkTileParams& work, int32_t r, PendingPv& pending) {
  const int32_t rows = smaller(work.num_rows - r, kRowBlocks * kRowBlock);
  for (int32_t i = 0; i < pending.count; ++i) {
    if (pending.tiles[i]->non_finite != 0) add_non_finite(work, r, rows, *pending.tiles[i], pending.p[i]);
  }
  pending.count = 0;
}

/// GEMM1 of all pending KV tiles, for the row blocks from row `r` on. Clears `pending`.
template <class Tiles, int kRowBlocks, class Pipeline>
static void gemm_pv(const WorkTileParams& work, int32_t r, PendingPv& pending, Pipeline& pipeline) {
  if (pending.count == 0) return;
  float* const acc = work.state.acc + r * work.v_stride;
  const int32_t dims = work.v_stride / kDimTile;
  const PvProducts products = pv_products(work);
  constexpr int kAtOnce = 4 / kRowBlocks;
  int32_t d = 0;
  for (; d + kAtOnce <= dims; d += kAtOnce)
    pv_dim_tiles<Tiles, kRowBlocks, kAtOnce>(acc, work.v_stride, d, pending, products, pipeline);
  for (; d < dims; ++d) pv_dim_tiles<Tiles, kRowBlocks, 1>(acc, work.v_stride, d, pending, products, pipeline);
  end_pending_pv<kRowBlocks>(work, r, pending);
}

/// Rescales acc of those rows of a row block whose row_max moved.
FOLIO_INLINE void rescale_acc_rows(const WorkTileParams& work, int32_t r, __mmask16 raised, Vec rescale) {
  for (uint32_t left = raised; left != 0; left &= left - 1) {
    const int32_t i = __builtin_ctz(left);
    float* const acc = work.state.acc + (r + i) * work.v_stride;
    const Vec factor = splat(rescale[i]);
    for (int32_t d = 0; d < work.v_stride; d += kLanes) store(acc + d, load<Vec>(acc + d) * factor);
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
