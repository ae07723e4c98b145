#include "kernels/cuda/sm90/prefill/prefill.cuh"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

void launch_e5m2_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream) {
  launch_class<__half, 128, 128, Fp8::kE5M2>(params, variant, num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
