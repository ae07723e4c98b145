#pragma once

// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/sm90/prefill/kernel.cuh"

/// "cuda-sm90-prefill" on the host: launch_prefill, run by the emulator. Its instantiations take a while to compile, so
/// they are spread over several sources.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, bool kFp8Mma>
void launch_prefill(const AttentionParams& attention, Variant variant, int32_t num_workers, Stream) {
  static uint64_t seed = 0;
  const PrefillParams params = make_params(attention, {DimQk, DimV}, element_bytes(kFp8));
  emulation::run_grid(num_workers, kThreads, smem_bytes<DimQk, DimV, dequantizes(kFp8, kFp8Mma)>(), ++seed, [&] {
    if constexpr (kFp8Mma) {
      run_cta<T, DimQk, DimV, Variant::kPlain, kFp8, true>(params, emulation::shared_memory());
    } else {
      switch (variant) {
        case Variant::kPlain: run_cta<T, DimQk, DimV, Variant::kPlain, kFp8>(params, emulation::shared_memory()); break;
        case Variant::kCap: run_cta<T, DimQk, DimV, Variant::kCap, kFp8>(params, emulation::shared_memory()); break;
        case Variant::kAlibi: run_cta<T, DimQk, DimV, Variant::kAlibi, kFp8>(params, emulation::shared_memory()); break;
        case Variant::kMask: run_cta<T, DimQk, DimV, Variant::kMask, kFp8>(params, emulation::shared_memory()); break;
        case Variant::kAny: run_cta<T, DimQk, DimV, Variant::kAny, kFp8>(params, emulation::shared_memory()); break;
      }
    }
  });
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
