#pragma once

#include "kernels/cpu/common/mainloop.hpp"
#include "kernels/cpu/generic/gemm.hpp"
#include "kernels/cpu/generic/gemm_qk_bf16.hpp"

/// The mainloop of the portable kernel: common/mainloop.hpp's, with the GEMMs of gemm.hpp or, of GEMM0, of
/// gemm_qk_bf16.hpp.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// `kMma`: GEMM0 by BFMMLA. `kDsMla`: K and V are rows of KvFormat::kFp8DsMla, which become rows of kType, floats, KV
/// tile by KV tile.
template <DType kType, bool kMma = false, bool kDsMla = false>
static void mainloop_as(const WorkTileParams* heads, int32_t num_heads) {
#if defined(FOLIO_VEC_BFMMLA)
  for (int32_t h = 0; kMma && h < num_heads; ++h) pack_q(heads[h]);
#endif
  const auto k_bytes = kDsMla ? kDsMlaRowBytes : static_cast<int32_t>(heads[0].head_dim_qk * element_bytes(kType));
  const auto v_bytes = static_cast<int32_t>(heads[0].head_dim_v * element_bytes(kType));
  iterate_kv_tiles(
      heads, num_heads, k_bytes, v_bytes,
      [](const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch)
          __attribute__((always_inline)) {
            if constexpr (kDsMla) decode_ds_mla(work, located.rows);
#if defined(FOLIO_VEC_BFMMLA)
            if constexpr (kMma) return gemm_qk_bf16(work, located.rows.k, prefetch);
#endif
            gemm_qk<kType>(work, located, prefetch);
          },
      [](const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch)
          __attribute__((always_inline)) { gemm_pv<kType>(work, located, prefetch); });
}

/// Chooses GEMM0: floats, or BFMMLA where the instruction set has it and Q and K are bfloat16 without rounding. A
/// rotary embedding rounds to float32.
template <DType kType>
FOLIO_INLINE void mainloop_for(const WorkTileParams* heads, int32_t num_heads) {
#if defined(FOLIO_VEC_BFMMLA)
  if constexpr (kType == DType::kBFloat16) {
    const DType q = heads[0].q_dtype;
    const bool q_is_bfloat16 = q == DType::kBFloat16 || is_fp8_type(q);
    if (q_is_bfloat16 && heads[0].rope == nullptr) return mainloop_as<kType, true>(heads, num_heads);
  }
#endif
  mainloop_as<kType>(heads, num_heads);
}

static void mainloop(const WorkTileParams* heads, int32_t num_heads) noexcept {
  if (heads[0].kv.ds_mla) return mainloop_as<DType::kFloat32, false, true>(heads, num_heads);
  with_kv_dtype(heads[0].kv.dtype, [&]<DType kType>() { mainloop_for<kType>(heads, num_heads); });
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
