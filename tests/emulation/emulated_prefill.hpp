#pragma once

// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/sm90/prefill/launch.hpp"
#include "kernels/cuda/sm90/prefill/thread_block.cuh"

/// "cuda-sm90-prefill" on the host: the launch of one of its .cu files, run by the emulator. The sources that use it
/// have a type each, since each takes a while to compile.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

template <typename T, int32_t DimQk, int32_t DimV, Codes kCodes = Codes::kNone>
void emulate(const AttentionParams& attention, Variant variant, int32_t num_workers) {
  static uint64_t seed = 0;
  PrefillParams params{};
  params.attention = attention;
  describe(params, {DimQk, DimV}, element_bytes(kCodes));
  emulation::run_grid(num_workers, kThreads, shared_bytes<DimQk, DimV>(), ++seed, [&] {
    switch (variant) {
      case Variant::kPlain:
        run_thread_block<T, DimQk, DimV, Variant::kPlain, kCodes>(params, emulation::shared_memory());
        break;
      case Variant::kCap:
        run_thread_block<T, DimQk, DimV, Variant::kCap, kCodes>(params, emulation::shared_memory());
        break;
      case Variant::kAlibi:
        run_thread_block<T, DimQk, DimV, Variant::kAlibi, kCodes>(params, emulation::shared_memory());
        break;
      case Variant::kAny:
        run_thread_block<T, DimQk, DimV, Variant::kAny, kCodes>(params, emulation::shared_memory());
        break;
    }
  });
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
