// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>

#include "emulated_kernels.hpp"
#include "kernels/cuda/sm90/mla/kernel.cuh"

/// "cuda-sm90-mla" on the host: its instantiations, run by the emulator.
namespace folio::inline v0::kernels::cuda {
namespace sm90::mla {

template <typename Traits, bool General>
void launch_kernel(const MlaParams& params, int32_t num_workers, Stream) {
  static uint64_t seed = 0;
  emulation::run_grid(num_workers, Traits::kThreads, smem_bytes<Traits>(), ++seed,
                      [&] { run_cta<Traits, General>(params, emulation::shared_memory()); });
}
#define FOLIO_INSTANTIATE(dim_qk)                                                                                     \
  template void launch_rows<DType::kFloat16, dim_qk>(const AttentionParams&, bool, bool, int32_t, Stream);            \
  template void launch_rows<DType::kBFloat16, dim_qk>(const AttentionParams&, bool, bool, int32_t, Stream);           \
  template void launch_swap_ab<DType::kFloat16, dim_qk, Fp8::kNone, false>(const AttentionParams&, int32_t, Stream);  \
  template void launch_swap_ab<DType::kBFloat16, dim_qk, Fp8::kNone, false>(const AttentionParams&, int32_t, Stream); \
  template void launch_swap_ab<DType::kFloat16, dim_qk, Fp8::kE4M3, false>(const AttentionParams&, int32_t, Stream);  \
  template void launch_swap_ab<DType::kFloat16, dim_qk, Fp8::kE5M2, false>(const AttentionParams&, int32_t, Stream);
FOLIO_INSTANTIATE(576)
FOLIO_INSTANTIATE(512)
#undef FOLIO_INSTANTIATE
template void launch_rows_ds_mla<false>(const AttentionParams&, int32_t, Stream);
template void launch_rows_ds_mla<true>(const AttentionParams&, int32_t, Stream);
template void launch_swap_ab<DType::kFloat16, 576, Fp8::kE4M3, true>(const AttentionParams&, int32_t, Stream);

}  // namespace sm90::mla

std::span<const AttentionKernel* const> emulated_kernels() {
  static constexpr std::array<const AttentionKernel*, 1> kAll{&sm90::mla::kSm90MlaKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
