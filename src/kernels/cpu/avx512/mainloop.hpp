#pragma once

#include "kernels/cpu/avx512/gemm.hpp"
#include "kernels/cpu/avx512/gemm_pv_bf16.hpp"
#include "kernels/cpu/common/softmax.hpp"

/// The mainloop of the AVX-512 kernel: over the KV tiles of work tiles, 64 tokens each. One thread is producer and
/// consumer.
///
///     find_tile (page table, mask)      KV tile i            prefetched meanwhile, to L2
///       |
///     gemm_qk   S = Q K^T               K upcast on load     V of tile i
///     softmax_rows  row_max, P, row_sum
///     gemm_pv   O = O * rescale + P V   V upcast on load     K of tile i + 1
///
/// With several KV heads, tile i + 1 is the next head's of the same tokens, then the first head's next: memory is read
/// about in its order. Prefetches then run a whole tile ahead: K of tile i + 1 in gemm_qk, V of tile i + 1 in gemm_pv.
///
/// Up to 8 rows (decode) load K and V straight from the cache. More rows (prefill) share upcast copies in scratch
/// memory. Both do the same operations in the same order, so that their bits are equal.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

template <DType kType, bool kDot>
static void mainloop_as(const WorkTileParams* heads, int32_t num_heads) {
  const KvOperand& kv = heads[0].kv;
  const TileScratch& scratch = heads[0].scratch;
  for (int32_t h = 0; h < num_heads; ++h) reorder_q<kType, kDot>(heads[h]);
  LocatedTile located[2];
  for (int i = 0; i < 2; ++i) {
    const unsigned char** const rows = scratch.rows + 2 * i * kTileTokens;
    located[i].rows = {rows, rows + kTileTokens, scratch.pairs + 8 * i * heads[0].v_stride};
    located[i].visible = scratch.visible + i * padded_rows(heads[0].num_rows);
  }
  const auto k_bytes = static_cast<int32_t>(heads[0].head_dim_qk * element_bytes(kType));
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
    const Prefetch next_k{more ? next.rows.k : nullptr, 0, k_bytes, 0};
    const Prefetch v{v_is_k ? nullptr : now.rows.v, 0, v_bytes, v_pair_bytes};
    gemm_qk<kType, kDot>(work, now.rows.k, num_heads > 1 ? next_k : v);
    softmax_rows(work, now.tile, now.visible);
    const Prefetch next_v{more && !v_is_k ? next.rows.v : nullptr, 0, v_bytes, v_pair_bytes};
    const Prefetch& during_pv = num_heads > 1 ? next_v : next_k;
#if defined(__AVX512BF16__)
    if constexpr (kDot) {
      for (int32_t r = 0; r < work.num_rows; ++r) round_p(scratch.p + r * kTileTokens);
      gemm_pv_bf16<kType>(work, now, during_pv);
      continue;
    }
#endif
    gemm_pv<kType>(work, now, during_pv);
  }
}

/// Chooses the GEMMs: float32, or VDPBF16PS where the instruction set has it and Q, K and V are bfloat16 without
/// rounding.
template <DType kType>
FOLIO_INLINE void mainloop_for(const WorkTileParams* heads, int32_t num_heads) {
#if defined(__AVX512BF16__)
  if constexpr (kType == DType::kBFloat16 || is_fp8_type(kType)) {
    const DType q = heads[0].q_dtype;
    if (q == DType::kBFloat16 || is_fp8_type(q)) return mainloop_as<kType, true>(heads, num_heads);
  }
#endif
  mainloop_as<kType, false>(heads, num_heads);
}

static void mainloop(const WorkTileParams* heads, int32_t num_heads) noexcept {
  switch (heads[0].kv.dtype) {
    case DType::kFloat32: mainloop_for<DType::kFloat32>(heads, num_heads); break;
    case DType::kFloat16: mainloop_for<DType::kFloat16>(heads, num_heads); break;
    case DType::kBFloat16: mainloop_for<DType::kBFloat16>(heads, num_heads); break;
    case DType::kFloat8E4M3: mainloop_for<DType::kFloat8E4M3>(heads, num_heads); break;
    case DType::kFloat8E5M2: mainloop_for<DType::kFloat8E5M2>(heads, num_heads); break;
    case DType::kFloat4E2M1x2:
    case DType::kInt8:
    case DType::kUnset: break;
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
