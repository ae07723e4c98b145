#pragma once

#include "kernels/cpu/common/producer.hpp"
#include "kernels/cpu/common/softmax.hpp"

/// The mainloop of the kernels that compute in floats: over the KV tiles of work tiles, 64 tokens each. One thread is
/// producer and consumer.
///
///     find_tile (page table, mask)      KV tile i            prefetched meanwhile, to L2
///       |
///     gemm_qk   S = Q K^T               K upcast on load     V of tile i
///     softmax_rows  row_max, P, row_sum   int8: S times scales of K, P times scales of V
///     gemm_pv   O = O * rescale + P V   V upcast on load     K of tile i + 1
///
/// With several KV heads, tile i + 1 is the next head's of the same tokens, then the first head's next: memory is read
/// about in its order. Prefetches then run a whole tile ahead: K of tile i + 1 in gemm_qk, V of tile i + 1 in gemm_pv.
///
/// Up to 8 rows (decode) load K and V straight from the cache. More rows (prefill) share upcast copies in scratch
/// memory. Both do the same operations in the same order, so that their bits are equal.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// `k_bytes`, `v_bytes`: of a token of one head. gemm_qk(work, located, prefetch) computes S, gemm_pv(work, located,
/// prefetch) adds P V to acc.
template <typename GemmQk, typename GemmPv>
FOLIO_INLINE void iterate_kv_tiles(const WorkTileParams* heads, int32_t num_heads, int32_t k_bytes, int32_t v_bytes,
                                   GemmQk gemm_qk, GemmPv gemm_pv) {
  const KvOperand& kv = heads[0].kv;
  const TileScratch& scratch = heads[0].scratch;
  LocatedTile located[2];
  for (int i = 0; i < 2; ++i) {
    const unsigned char** const rows = scratch.rows + 2 * i * kTileTokens;
    located[i].rows = {rows, rows + kTileTokens, scratch.pairs + 8 * i * heads[0].v_stride};
    located[i].visible = scratch.visible + i * padded_rows(heads[0].num_rows);
    if (kv.k_scales != nullptr) {
      float* const scales = scratch.token_scales + 2 * i * kTileTokens;
      located[i].rows.scales = {scales, scales + kTileTokens};
    }
  }
  const int32_t v_pair_bytes = kv.packed_v ? v_bytes : 0;
  const bool k_streams = kv.k_token == k_bytes;
  const bool v_streams = kv.v_token == (kv.packed_v ? 2 : 1) * v_bytes;
  const bool v_is_k = kv.v >= kv.k && kv.v < kv.k + k_bytes;
  int32_t head = 0;
  bool more = find_tile(heads[0], kv.kv_begin / kTileTokens * kTileTokens, located[0]);
  for (int current = 0; more; current ^= 1) {
    const WorkTileParams& work = heads[head];
    const LocatedTile& now = located[current];
    LocatedTile& next = located[current ^ 1];
    more = next_tile(heads, num_heads, now, head, next);
    const Prefetch next_k{more ? next.rows.k : nullptr, 0, k_bytes, 0, k_streams};
    const Prefetch v{v_is_k ? nullptr : now.rows.v, 0, v_bytes, v_pair_bytes, v_streams};
    gemm_qk(work, now, num_heads > 1 ? next_k : v);
    softmax_rows(work, now.tile, now.visible, now.rows.scales);
    const Prefetch next_v{more && !v_is_k ? next.rows.v : nullptr, 0, v_bytes, v_pair_bytes, v_streams};
    gemm_pv(work, now, num_heads > 1 ? next_v : next_k);
  }
}

/// Calls body.operator()<kType>() with the dtype of the cache.
template <typename Body>
FOLIO_INLINE void with_kv_dtype(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat32: body.template operator()<DType::kFloat32>(); break;
    case DType::kFloat16: body.template operator()<DType::kFloat16>(); break;
    case DType::kBFloat16: body.template operator()<DType::kBFloat16>(); break;
    case DType::kFloat8E4M3: body.template operator()<DType::kFloat8E4M3>(); break;
    case DType::kFloat8E5M2: body.template operator()<DType::kFloat8E5M2>(); break;
    case DType::kInt8: body.template operator()<DType::kInt8>(); break;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
