#pragma once

#include "kernels/cpu/common/softmax.hpp"
#include "kernels/cpu/generic/gemm.hpp"

/// The mainloop of the portable kernel: over the KV tiles of work tiles, 64 tokens each. One thread is producer and
/// consumer.
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

/// `kDsMla`: K and V are rows of KvFormat::kFp8DsMla, which become rows of kType, floats, KV tile by KV tile.
template <DType kType, bool kDsMla = false>
static void mainloop_as(const WorkTileParams* heads, int32_t num_heads) {
  const KvOperand& kv = heads[0].kv;
  const TileScratch& scratch = heads[0].scratch;
  LocatedTile located[2];
  for (int i = 0; i < 2; ++i) {
    const unsigned char** const rows = scratch.rows + 2 * i * kTileTokens;
    located[i].rows = {rows, rows + kTileTokens, scratch.pairs + 8 * i * heads[0].v_stride};
    located[i].visible = scratch.visible + i * padded_rows(heads[0].num_rows);
    if constexpr (kType == DType::kInt8) {
      float* const scales = scratch.token_scales + 2 * i * kTileTokens;
      located[i].rows.scales = {scales, scales + kTileTokens};
    }
  }
  const auto k_bytes = kDsMla ? kDsMlaRowBytes : static_cast<int32_t>(heads[0].head_dim_qk * element_bytes(kType));
  const auto v_bytes = static_cast<int32_t>(heads[0].head_dim_v * element_bytes(kType));
  const int32_t v_pair_bytes = kv.packed_v ? v_bytes : 0;
  const bool v_is_k = kv.v >= kv.k && kv.v < kv.k + k_bytes;
  int32_t head = 0;
  bool more = find_tile(heads[0], kv.kv_begin / kTileTokens * kTileTokens, located[0]);
  for (int current = 0; more; current ^= 1) {
    const WorkTileParams& work = heads[head];
    const LocatedTile& now = located[current];
    LocatedTile& next = located[current ^ 1];
    more = next_tile(heads, num_heads, now, head, next);
    if constexpr (kDsMla) decode_ds_mla(work, now.rows);
    const Prefetch next_k{more ? next.rows.k : nullptr, 0, k_bytes, 0};
    const Prefetch v{v_is_k ? nullptr : now.rows.v, 0, v_bytes, v_pair_bytes};
    gemm_qk<kType>(work, now, num_heads > 1 ? next_k : v);
    softmax_rows(work, now.tile, now.visible, now.rows.scales);
    const Prefetch next_v{more && !v_is_k ? next.rows.v : nullptr, 0, v_bytes, v_pair_bytes};
    gemm_pv<kType>(work, now, num_heads > 1 ? next_v : next_k);
  }
}

static void mainloop(const WorkTileParams* heads, int32_t num_heads) noexcept {
  if (heads[0].kv.ds_mla) return mainloop_as<DType::kFloat32, true>(heads, num_heads);
  switch (heads[0].kv.dtype) {
    case DType::kFloat32: mainloop_as<DType::kFloat32>(heads, num_heads); break;
    case DType::kFloat16: mainloop_as<DType::kFloat16>(heads, num_heads); break;
    case DType::kBFloat16: mainloop_as<DType::kBFloat16>(heads, num_heads); break;
    case DType::kFloat8E4M3: mainloop_as<DType::kFloat8E4M3>(heads, num_heads); break;
    case DType::kFloat8E5M2: mainloop_as<DType::kFloat8E5M2>(heads, num_heads); break;
    case DType::kInt8: mainloop_as<DType::kInt8>(heads, num_heads); break;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
