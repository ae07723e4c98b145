#include "kernels/cuda/sm90/decode/decode.cuh"

namespace folio::inline v0::kernels::cuda::sm90::decode {

void launch_float16_128_128(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  launch_class<__half, 128, 128>(params, shape, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
