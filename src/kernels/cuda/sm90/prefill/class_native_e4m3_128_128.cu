#include "kernels/cuda/sm90/prefill/native.cuh"
#include "kernels/cuda/sm90/prefill/prefill.cuh"

namespace folio::inline v0::kernels::cuda::sm90::prefill {
namespace {

__global__ void __launch_bounds__(kThreads, 1) native_prefill_kernel(const __grid_constant__ PrefillParams params) {
  static_assert(kNativeSharedBytes <= kSharedLimit);
  extern __shared__ __align__(16) unsigned char raw[];
  ptx::griddep_launch_dependents();
  run_native_thread_block(params, raw + (1024 - ptx::shared_address(raw) % 1024) % 1024);
}

}  // namespace

void launch_native_e4m3_128_128(const AttentionParams& attention, Variant, int32_t num_workers, Stream stream) {
  PrefillParams params{};
  params.attention = attention;
  describe(params, kNativeDims, element_bytes(Fp8::kE4M3));
  launch_kernel<native_prefill_kernel>(params, num_workers, kNativeSharedBytes, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
