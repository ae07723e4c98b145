// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>

#include "emulated_kernels.hpp"
#include "kernels/cuda/sm90/mla/launch.hpp"
#include "kernels/cuda/sm90/mla/mla_kernel.hpp"
#include "kernels/cuda/sm90/mla/thread_block.cuh"

/// "cuda-sm90-mla" on the host: the launches of its .cu files, run by the emulator.
namespace folio::inline v0::kernels::cuda {
namespace sm90::mla {
namespace {

template <typename T>
void emulate(const AttentionParams& attention, bool general, int32_t num_workers) {
  static uint64_t seed = 0;
  MlaParams params{};
  params.attention = attention;
  describe(params);
  emulation::run_grid(num_workers, kThreads, kSharedBytes, ++seed, [&] {
    if (general) {
      run_thread_block<T, true>(params, emulation::shared_memory());
    } else {
      run_thread_block<T, false>(params, emulation::shared_memory());
    }
  });
}

}  // namespace

void launch_bfloat16(const AttentionParams& params, bool general, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16>(params, general, num_workers);
}
void launch_float16(const AttentionParams& params, bool general, int32_t num_workers, Stream) {
  emulate<__half>(params, general, num_workers);
}

}  // namespace sm90::mla

std::span<const AttentionKernel* const> emulated_kernels() {
  static constexpr std::array<const AttentionKernel*, 1> kAll{&sm90::mla::kSm90MlaKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
