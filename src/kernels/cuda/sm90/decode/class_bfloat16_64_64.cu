#include "kernels/cuda/sm90/decode/decode.cuh"

namespace folio::inline v0::kernels::cuda::sm90::decode {

void launch_bfloat16_64_64(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  launch_class<__nv_bfloat16, 64, 64>(params, shape, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
