#include "kernels/cuda/sm80/attention/attend.cuh"

namespace folio::inline v0::kernels::cuda::sm80 {

void launch_bfloat16_2(const AttentionParams& params, int32_t num_workers, Stream stream) {
  launch_class<__nv_bfloat16, 192, 128>(params, num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
