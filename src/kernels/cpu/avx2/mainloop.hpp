#pragma once

#include "kernels/cpu/avx2/gemm.hpp"
#include "kernels/cpu/common/mainloop.hpp"

/// The mainloop of the AVX2 kernel: common/mainloop.hpp's, with the GEMMs of gemm.hpp.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

template <DType kType, bool kPairs>
static void mainloop_as(const WorkTileParams* heads, int32_t num_heads) {
  for (int32_t h = 0; h < num_heads; ++h) reorder_q<kType>(heads[h]);
  iterate_kv_tiles(
      heads, num_heads, static_cast<int32_t>(heads[0].head_dim_qk * element_bytes(kType)),
      static_cast<int32_t>(heads[0].head_dim_v * element_bytes(kType)),
      [](const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch)
          __attribute__((always_inline)) { gemm_qk<kType>(work, located.rows.k, prefetch); },
      [](const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch)
          __attribute__((always_inline)) { gemm_pv<kType, kPairs>(work, located, prefetch); });
}

/// Packed pages are never float32.
template <DType kType>
FOLIO_INLINE void mainloop_for(const WorkTileParams* heads, int32_t num_heads) {
  if constexpr (kType != DType::kFloat32) {
    if (heads[0].kv.packed_v) return mainloop_as<kType, true>(heads, num_heads);
  }
  mainloop_as<kType, false>(heads, num_heads);
}

static void mainloop(const WorkTileParams* heads, int32_t num_heads) noexcept {
  with_kv_dtype(heads[0].kv.dtype, [&]<DType kType>() { mainloop_for<kType>(heads, num_heads); });
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
