#pragma once

#include "kernels/cpu/common/softmax.hpp"
#include "kernels/cpu/generic/gemm.hpp"

/// The mainloop of the portable kernel: over the KV tiles of a work tile, 64 tokens each. One thread is producer and
/// consumer.
///
///     find_tile (page table, mask)      KV tile i            prefetched meanwhile, to L2
///       |
///     gemm_qk   S = Q K^T               K upcast on load     V of tile i
///     softmax_row   row_max, P, row_sum
///     gemm_pv   O = O * rescale + P V   V upcast on load     K of tile i + 1
///
/// Up to 8 rows (decode) load K and V straight from the cache. More rows (prefill) share upcast copies in scratch
/// memory. Both do the same operations in the same order, so that their bits are equal.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

template <DType kType>
static void mainloop_as(const WorkTileParams& work) {
  const KvOperand& kv = work.kv;
  const TileScratch& scratch = work.scratch;
  LocatedTile located[2];
  for (int i = 0; i < 2; ++i) {
    const unsigned char** const rows = scratch.rows + 2 * i * kTileTokens;
    located[i].rows = {rows, rows + kTileTokens, scratch.pairs + 8 * i * work.v_stride};
    located[i].visible = scratch.visible + i * padded_rows(work.num_rows);
  }
  const auto k_bytes = static_cast<int32_t>(work.head_dim_qk * element_bytes(kType));
  const auto v_bytes = static_cast<int32_t>(work.head_dim_v * element_bytes(kType));
  const bool v_is_k = kv.v >= kv.k && kv.v < kv.k + k_bytes;
  bool more = find_tile(work, kv.kv_begin / kTileTokens * kTileTokens, located[0]);
  for (int current = 0; more; current ^= 1) {
    const LocatedTile& now = located[current];
    LocatedTile& next = located[current ^ 1];
    more = find_tile(work, now.tile.first + kTileTokens, next);
    gemm_qk<kType>(work, now, {v_is_k ? nullptr : now.rows.v, v_bytes, kv.packed_v});
    for (int32_t r = 0; r < work.num_rows; ++r) {
      float* const p = scratch.p + r * kTileTokens;
      if (now.visible[r] != 0) {
        scratch.rescale[r] = softmax_row(work, now.tile, r, now.visible[r], p);
      } else {
        scratch.rescale[r] = 1.0f;
        __builtin_memset(p, 0, kTileTokens * sizeof(float));
      }
    }
    gemm_pv<kType>(work, now, {more ? next.rows.k : nullptr, k_bytes, false});
  }
}

static void mainloop(const WorkTileParams& work) noexcept {
  switch (work.kv.dtype) {
    case DType::kFloat32: mainloop_as<DType::kFloat32>(work); break;
    case DType::kFloat16: mainloop_as<DType::kFloat16>(work); break;
    case DType::kBFloat16: mainloop_as<DType::kBFloat16>(work); break;
    case DType::kFloat8E4M3: mainloop_as<DType::kFloat8E4M3>(work); break;
    case DType::kFloat8E5M2: mainloop_as<DType::kFloat8E5M2>(work); break;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
