#include "kernels/cuda/sm90/decode/decode.cuh"

namespace folio::inline v0::kernels::cuda::sm90::decode {

void launch_e5m2_64_64(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  launch_class<__half, 64, 64, Fp8::kE5M2>(params, shape, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
