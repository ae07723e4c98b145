#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/quantize/quantize.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;

/// The bits of magnitudes are ordered as their values are, and a NaN's stand above all.
__device__ uint32_t magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

__device__ int64_t offset_of(const MaxScaleParams& params, int64_t index) {
  int64_t offset = 0;
  for (int32_t d = params.rank - 1; d >= 0; --d) {
    offset += index % params.shape[d] * params.strides[d];
    index /= params.shape[d];
  }
  return offset;
}

__global__ void begin_kernel(float* out) {
  *out = 0.0f;
}

/// kElements neighbours at a time where the tensor is packed.
template <int32_t kElements>
__global__ void __launch_bounds__(kThreads) max_kernel(const __grid_constant__ MaxScaleParams params) {
  uint32_t most = 0;
  const int64_t step = int64_t{gridDim.x} * kThreads * kElements;
#pragma unroll 4
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kElements; i < params.num_elements; i += step) {
    float values[kElements];
    load_floats<kElements>(element_at(params.data, params.dtype, kElements == kWide ? i : offset_of(params, i)),
                           params.dtype, values);
    for (const float value : values) most = max(most, magnitude_bits(value));
  }
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<uint32_t*>(params.out), most);
}

__global__ void end_kernel(const __grid_constant__ MaxScaleParams params) {
  const float largest = *params.out;
  *params.out = largest == 0.0f ? 1.0f : __fdiv_rn(largest, params.constant);
}

bool is_packed(const MaxScaleParams& params) {
  int64_t stride = 1;
  for (int32_t d = params.rank - 1; d >= 0; --d) {
    if (params.shape[d] != 1 && params.strides[d] != stride) return false;
    stride *= params.shape[d];
  }
  return params.num_elements % kWide == 0 && is_wide(params.data, params.dtype, {});
}

}  // namespace

void enqueue(const MaxScaleParams& params, Stream stream) {
  begin_kernel<<<1, 1, 0, native(stream)>>>(params.out);
  check_launch("a scale's beginning");
  if (params.num_elements > 0) {
    if (is_packed(params)) {
      max_kernel<kWide>
          <<<grid_for(params.num_elements, 4 * kThreads * kWide, 4096), kThreads, 0, native(stream)>>>(params);
    } else {
      max_kernel<1><<<grid_for(params.num_elements, 4 * kThreads, 4096), kThreads, 0, native(stream)>>>(params);
    }
    check_launch("the largest magnitude");
  }
  end_kernel<<<1, 1, 0, native(stream)>>>(params);
  check_launch("a scale's end");
}

}  // namespace folio::inline v0::kernels::cuda
