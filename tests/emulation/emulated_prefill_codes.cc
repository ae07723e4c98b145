#include "emulated_prefill.hpp"

#include "kernels/cuda/sm90/prefill/native.cuh"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

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

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
