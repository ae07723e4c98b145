// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <type_traits>

#include "emulated_kernels.hpp"
#include "kernels/cuda/sm90/mla/kernel.cuh"

/// "cuda-sm90-mla" on the host: its instantiations, run by the emulator.
namespace folio::inline v0::kernels::cuda {
namespace sm90::mla {

template <DType kDType, int32_t DimQk>
void launch_instantiation(const AttentionParams& attention, bool general, bool fp8, int32_t num_workers, Stream) {
  using T = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;
  static uint64_t seed = 0;
  const MlaParams params = make_params(attention, kDType);
  const auto run = general ? (fp8 ? run_cta<T, DimQk, true, true> : run_cta<T, DimQk, true, false>)
                           : (fp8 ? run_cta<T, DimQk, false, true> : run_cta<T, DimQk, false, false>);
  emulation::run_grid(num_workers, kThreads, kSmemBytes, ++seed, [&] { run(params, emulation::shared_memory()); });
}
template void launch_instantiation<DType::kFloat16, 576>(const AttentionParams&, bool, bool, int32_t, Stream);
template void launch_instantiation<DType::kFloat16, 512>(const AttentionParams&, bool, bool, int32_t, Stream);
template void launch_instantiation<DType::kBFloat16, 576>(const AttentionParams&, bool, bool, int32_t, Stream);
template void launch_instantiation<DType::kBFloat16, 512>(const AttentionParams&, bool, bool, int32_t, Stream);

}  // namespace sm90::mla

std::span<const AttentionKernel* const> emulated_kernels() {
  static constexpr std::array<const AttentionKernel*, 1> kAll{&sm90::mla::kSm90MlaKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
