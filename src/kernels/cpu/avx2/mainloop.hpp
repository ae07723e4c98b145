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
  if (heads[0].kv.packed_v) return mainloop_as<kType, true>(heads, num_heads);
  mainloop_as<kType, false>(heads, num_heads);
}

static void mainloop(const WorkTileParams* heads, int32_t num_heads) noexcept {
  switch (heads[0].kv.dtype) {
    case DType::kFloat32: mainloop_as<DType::kFloat32, false>(heads, num_heads); break;
    case DType::kFloat16: mainloop_for<DType::kFloat16>(heads, num_heads); break;
    case DType::kBFloat16: mainloop_for<DType::kBFloat16>(heads, num_heads); break;
    case DType::kFloat8E4M3: mainloop_for<DType::kFloat8E4M3>(heads, num_heads); break;
    case DType::kFloat8E5M2: mainloop_for<DType::kFloat8E5M2>(heads, num_heads); break;
    case DType::kInt8: mainloop_for<DType::kInt8>(heads, num_heads); break;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
