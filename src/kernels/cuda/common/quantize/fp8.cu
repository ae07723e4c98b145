#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/quantize/quantize.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kUnroll = 4;

/// A thread takes kUnroll pieces of kElements neighbours.
template <int32_t kElements>
__global__ void __launch_bounds__(kThreads) fp8_kernel(const __grid_constant__ QuantizeFp8Params params) {
  const int32_t per_head = params.sizes.head_dim / kElements;
  const int32_t per_token = per_head * params.sizes.num_heads;
  const int64_t total = params.sizes.num_tokens * per_token;
  const float scale = scale_value(params.scale, 0, 0);
  const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll;
  for (int64_t first = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x; first < total; first += step) {
    float values[kUnroll][kElements];
    std::byte* to[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kThreads;
      to[u] = nullptr;
      if (i >= total) continue;
      const int64_t token = i / per_token;
      const auto in_token = static_cast<int32_t>(i % per_token);
      const int32_t head = in_token / per_head;
      const int32_t d = in_token % per_head * kElements;
      const int64_t from = token * params.in.token_stride + head * params.in.head_stride + d;
      load_floats<kElements>(element_at<const std::byte>(params.in.data, params.in.dtype, from), params.in.dtype,
                             values[u]);
      to[u] = params.out.data + token * params.out.token_stride + head * params.out.head_stride + d;
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      if (to[u] == nullptr) continue;
#pragma unroll
      for (int32_t e = 0; e < kElements; ++e) values[u][e] /= scale;
      store_floats<kElements>(to[u], params.out.dtype, values[u]);
    }
  }
}

}  // namespace

void enqueue(const QuantizeFp8Params& params, Stream stream) {
  const int64_t elements = params.sizes.num_tokens * params.sizes.num_heads * params.sizes.head_dim;
  if (elements == 0) return;
  const bool wide = params.sizes.head_dim % kWide == 0 &&
                    is_wide(params.in.data, params.in.dtype, {params.in.token_stride, params.in.head_stride}) &&
                    is_wide(params.out.data, params.out.dtype, {params.out.token_stride, params.out.head_stride});
  if (wide) {
    fp8_kernel<kWide><<<grid_for(elements / kWide, kThreads * kUnroll), kThreads, 0, native(stream)>>>(params);
  } else {
    fp8_kernel<1><<<grid_for(elements, kThreads * kUnroll), kThreads, 0, native(stream)>>>(params);
  }
  check_launch("the quantisation to fp8");
}

}  // namespace folio::inline v0::kernels::cuda
