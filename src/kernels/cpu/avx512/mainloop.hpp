#pragma once

#include "kernels/cpu/avx512/gemm.hpp"
#include "kernels/cpu/avx512/gemm_pv_bf16.hpp"
#include "kernels/cpu/common/mainloop.hpp"

/// The mainloop of the AVX-512 kernels: common/mainloop.hpp's, with the GEMMs of gemm.hpp or, of GEMM1, of
/// gemm_pv_bf16.hpp.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

template <DType kType, bool kDot>
static void mainloop_as(const WorkTileParams* heads, int32_t num_heads) {
  for (int32_t h = 0; h < num_heads; ++h) reorder_q<kType, kDot>(heads[h]);
  iterate_kv_tiles(
      heads, num_heads, static_cast<int32_t>(heads[0].head_dim_qk * element_bytes(kType)),
      static_cast<int32_t>(heads[0].head_dim_v * element_bytes(kType)),
      [](const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch)
          __attribute__((always_inline)) { gemm_qk<kType, kDot>(work, located.rows.k, prefetch); },
      [](const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch)
          __attribute__((always_inline)) {
#if defined(__AVX512BF16__)
            if constexpr (kDot) {
              for (int32_t r = 0; r < work.num_rows; ++r) round_p(work.scratch.p + r * kTileTokens);
              return gemm_pv_bf16<kType>(work, located, prefetch);
            }
#endif
            gemm_pv<kType>(work, located, prefetch);
          });
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
  with_kv_dtype(heads[0].kv.dtype, [&]<DType kType>() { mainloop_for<kType>(heads, num_heads); });
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
