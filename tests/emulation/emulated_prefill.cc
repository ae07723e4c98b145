// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>

#include "emulated_kernels.hpp"
#include "kernels/cuda/sm90/prefill/launch.hpp"
#include "kernels/cuda/sm90/prefill/native.cuh"
#include "kernels/cuda/sm90/prefill/prefill_kernel.hpp"
#include "kernels/cuda/sm90/prefill/thread_block.cuh"

/// "cuda-sm90-prefill" on the host: the launches of its .cu files, run by the emulator.
namespace folio::inline v0::kernels::cuda {
namespace sm90::prefill {
namespace {

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

}  // namespace

void launch_bfloat16_64_64(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 64, 64>(params, variant, num_workers);
}
void launch_float16_64_64(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 64, 64>(params, variant, num_workers);
}
void launch_bfloat16_96_96(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 96, 96>(params, variant, num_workers);
}
void launch_float16_96_96(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 96, 96>(params, variant, num_workers);
}
void launch_bfloat16_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 128, 128>(params, variant, num_workers);
}
void launch_float16_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 128, 128>(params, variant, num_workers);
}
void launch_e4m3_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 128, 128, Codes::kE4M3>(params, variant, num_workers);
}
void launch_e5m2_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 128, 128, Codes::kE5M2>(params, variant, num_workers);
}
void launch_native_e4m3_128_128(const AttentionParams& attention, Variant, int32_t num_workers, Stream) {
  static uint64_t seed = 0;
  PrefillParams params{};
  params.attention = attention;
  describe(params, kNativeDims, element_bytes(Codes::kE4M3));
  emulation::run_grid(num_workers, kThreads, kNativeSharedBytes, ++seed,
                      [&] { run_native_thread_block(params, emulation::shared_memory()); });
}
void launch_bfloat16_192_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 192, 128>(params, variant, num_workers);
}
void launch_float16_192_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 192, 128>(params, variant, num_workers);
}
void launch_bfloat16_256_256(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 256, 256>(params, variant, num_workers);
}
void launch_float16_256_256(const AttentionParams& params, Variant variant, int32_t num_workers, Stream) {
  emulate<__half, 256, 256>(params, variant, num_workers);
}

}  // namespace sm90::prefill

std::span<const AttentionKernel* const> emulated_kernels() {
  static constexpr std::array<const AttentionKernel*, 1> kAll{&sm90::prefill::kSm90PrefillKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
