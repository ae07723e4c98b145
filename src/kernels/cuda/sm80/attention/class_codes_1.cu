#include "kernels/cuda/sm80/attention/attend.cuh"

namespace folio::inline v0::kernels::cuda::sm80 {

void launch_codes_1(const AttentionParams& params, int32_t num_workers, Stream stream) {
  launch_class<__half, 128, 128, true>(params, num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
