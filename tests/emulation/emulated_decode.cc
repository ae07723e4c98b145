// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>

#include "emulated_kernels.hpp"
#include "kernels/cuda/sm90/decode/kernel.cuh"

/// "cuda-sm90-decode" on the host: its instantiations, run by the emulator.
namespace folio::inline v0::kernels::cuda {
namespace sm90::decode {

template <DType kType, int32_t kDimQk, int32_t kDimV>
void launch_instantiation(const AttentionParams& attention, const LaunchShape& shape, Stream) {
  using T = typename ElementOf<kType>::Type;
  constexpr Fp8 kFp8 = ElementOf<kType>::kFp8;
  static uint64_t seed = 0;
  DecodeParams params{};
  params.attention = attention;
  set_copies(params, {kDimQk, kDimV, element_bytes(kFp8)});
  const bool low = shape.max_rows <= kTileRows;
  const int32_t bytes =
      low ? smem_bytes<kDimQk, kDimV, kFp8, kTileRows>() : smem_bytes<kDimQk, kDimV, kFp8, kMaxRows>();
  emulation::run_grid(shape.num_workers, cta_threads({kDimQk, kDimV}), bytes, ++seed, [&] {
    if (low) {
      run_cta<T, kDimQk, kDimV, kFp8, kTileRows>(params, emulation::shared_memory());
    } else {
      run_cta<T, kDimQk, kDimV, kFp8, kMaxRows>(params, emulation::shared_memory());
    }
  });
}

#define FOLIO_INSTANTIATE(type, dim_qk, dim_v) \
  template void launch_instantiation<type, dim_qk, dim_v>(const AttentionParams&, const LaunchShape&, Stream);
FOLIO_SM90_DECODE_INSTANTIATIONS(FOLIO_INSTANTIATE)
#undef FOLIO_INSTANTIATE

}  // namespace sm90::decode

std::span<const AttentionKernel* const> emulated_kernels() {
  static constexpr std::array<const AttentionKernel*, 1> kAll{&sm90::decode::kSm90DecodeKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
