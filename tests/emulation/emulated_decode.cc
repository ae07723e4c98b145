// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>

#include "emulated_kernels.hpp"
#include "kernels/cuda/sm90/decode/decode_kernel.hpp"
#include "kernels/cuda/sm90/decode/launch.hpp"
#include "kernels/cuda/sm90/decode/thread_block.cuh"

/// "cuda-sm90-decode" on the host: the launches of its .cu files, run by the emulator.
namespace folio::inline v0::kernels::cuda {
namespace sm90::decode {

namespace {

template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8 = Fp8::kNone>
void emulate(const AttentionParams& attention, const LaunchShape& shape) {
  static uint64_t seed = 0;
  DecodeParams params{};
  params.attention = attention;
  describe_segments(params, {DimQk, DimV, element_bytes(kFp8)});
  emulation::run_grid(shape.num_workers, threads({DimQk, DimV}), shared_bytes<DimQk, DimV, kFp8>(), ++seed, [&] {
    if (shape.max_rows <= kFewRows) {
      run_thread_block<T, DimQk, DimV, kFp8, kFewRows>(params, emulation::shared_memory());
    } else {
      run_thread_block<T, DimQk, DimV, kFp8, kMaxRows>(params, emulation::shared_memory());
    }
  });
}

}  // namespace

void launch_bfloat16_64_64(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__nv_bfloat16, 64, 64>(params, shape);
}
void launch_float16_64_64(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 64, 64>(params, shape);
}
void launch_e4m3_64_64(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 64, 64, Fp8::kE4M3>(params, shape);
}
void launch_e5m2_64_64(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 64, 64, Fp8::kE5M2>(params, shape);
}
void launch_bfloat16_96_96(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__nv_bfloat16, 96, 96>(params, shape);
}
void launch_float16_96_96(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 96, 96>(params, shape);
}
void launch_bfloat16_128_128(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__nv_bfloat16, 128, 128>(params, shape);
}
void launch_float16_128_128(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 128, 128>(params, shape);
}
void launch_e4m3_128_128(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 128, 128, Fp8::kE4M3>(params, shape);
}
void launch_e5m2_128_128(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 128, 128, Fp8::kE5M2>(params, shape);
}
void launch_bfloat16_192_128(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__nv_bfloat16, 192, 128>(params, shape);
}
void launch_float16_192_128(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 192, 128>(params, shape);
}
void launch_bfloat16_256_256(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__nv_bfloat16, 256, 256>(params, shape);
}
void launch_float16_256_256(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 256, 256>(params, shape);
}
void launch_e4m3_256_256(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 256, 256, Fp8::kE4M3>(params, shape);
}
void launch_e5m2_256_256(const AttentionParams& params, const LaunchShape& shape, Stream) {
  emulate<__half, 256, 256, Fp8::kE5M2>(params, shape);
}

}  // namespace sm90::decode

std::span<const AttentionKernel* const> emulated_kernels() {
  static constexpr std::array<const AttentionKernel*, 1> kAll{&sm90::decode::kSm90DecodeKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
