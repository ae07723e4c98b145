#include "kernels/cuda/sm80/attention/attend.cuh"

namespace folio::inline v0::kernels::cuda::sm80 {

void launch_codes_3(const AttentionParams& params, int32_t num_workers, Stream stream) {
  launch_class<__half, 256, 256, true>(params, num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
