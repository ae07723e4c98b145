#include "kernels/cuda/sm90/mla/mla.cuh"

namespace folio::inline v0::kernels::cuda::sm90::mla {

void launch_bfloat16(const AttentionParams& params, bool general, int32_t num_workers, Stream stream) {
  launch_class<__nv_bfloat16>(params, general, num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
