#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/numeric_conversion.cuh"
#include "kernels/cuda/common/quantize/quantize.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kFp8Threads = 256;
constexpr int32_t kUnroll = 4;

/// A thread takes kUnroll pieces of kElements neighbours.
template <int32_t kBytes, int32_t kElements>
__global__ void __launch_bounds__(kFp8Threads, 4) fp8_kernel(const __grid_constant__ QuantizeFp8Params params) {
  const auto total = static_cast<uint32_t>(params.sizes.num_tokens) * params.sizes.split.per_token.divisor();
  const Divisor scale(scale_at(params.scale, 0, 0));
  for (uint32_t first = blockIdx.x * kFp8Threads * kUnroll + threadIdx.x; first < total;
       first += gridDim.x * kFp8Threads * kUnroll) {
    Raw<kBytes, kElements> pieces[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * kFp8Threads;
      const PieceIndex at = params.sizes.split.at(min(i, total - 1));
      const int64_t from = at.token * params.in.token_stride + at.head * params.in.head_stride + at.piece * kElements;
      if (i < total) pieces[u] = load_raw<kBytes, kElements>(params.in.data + from * kBytes);
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * kFp8Threads;
      if (i >= total) continue;
      const PieceIndex at = params.sizes.split.at(i);
      const int64_t to = at.token * params.out.token_stride + at.head * params.out.head_stride + at.piece * kElements;
      float values[kElements];
      decode(pieces[u], params.in.dtype, values);
      scale.divide<kElements>(values);
      store_floats<kElements>(params.out.data + to, params.out.dtype, values);
    }
  }
}

template <int32_t kElements>
void launch(const QuantizeFp8Params& whole, Stream stream) {
  QuantizeFp8Params params = whole;
  params.sizes.split = PieceSplit(params.sizes.head_dim / kElements, params.sizes.num_heads);
  const int64_t per_token = params.sizes.split.per_token.divisor();
  for_slices(whole.sizes.num_tokens, per_token, [&](int64_t first, int64_t count) {
    params.sizes.num_tokens = count;
    params.in.data = whole.in.data + first * whole.in.token_stride * size_of(whole.in.dtype);
    params.out.data = whole.out.data + first * whole.out.token_stride;
    auto* const kernel = size_of(params.in.dtype) == 2 ? fp8_kernel<2, kElements> : fp8_kernel<4, kElements>;
    kernel<<<grid_for(count * per_token, kFp8Threads * kUnroll), kFp8Threads, 0, native(stream)>>>(params);
    check_launch("the quantisation to fp8");
  });
}

}  // namespace

void enqueue(const QuantizeFp8Params& params, Stream stream) {
  const bool wide = params.sizes.head_dim % kWide == 0 &&
                    is_wide(params.in.data, params.in.dtype, {params.in.token_stride, params.in.head_stride}) &&
                    is_wide(params.out.data, params.out.dtype, {params.out.token_stride, params.out.head_stride});
  if (wide) {
    launch<kWide>(params, stream);
  } else {
    launch<1>(params, stream);
  }
}

}  // namespace folio::inline v0::kernels::cuda
