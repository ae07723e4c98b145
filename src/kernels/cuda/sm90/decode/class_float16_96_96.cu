#include "kernels/cuda/sm90/decode/decode.cuh"

namespace folio::inline v0::kernels::cuda::sm90::decode {

void launch_float16_96_96(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  launch_class<__half, 96, 96>(params, shape, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
