#include "kernels/cuda/sm90/decode/decode.cuh"

namespace folio::inline v0::kernels::cuda::sm90::decode {

void launch_bfloat16_128_128(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  launch_class<__nv_bfloat16, 128, 128>(params, shape, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
