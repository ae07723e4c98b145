#include "kernels/cuda/sm90/prefill/prefill.cuh"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

void launch_bfloat16_64_64(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream) {
  launch_class<__nv_bfloat16, 64, 64>(params, variant, num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
