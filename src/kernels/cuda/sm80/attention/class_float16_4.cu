#include "kernels/cuda/sm80/attention/attend_large.cuh"

namespace folio::inline v0::kernels::cuda::sm80 {

void launch_float16_4(const AttentionParams& params, int32_t num_workers, Stream stream) {
  launch_large<__half>(params, num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
