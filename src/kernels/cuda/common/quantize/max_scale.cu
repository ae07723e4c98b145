#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/numeric_conversion.cuh"
#include "kernels/cuda/common/quantize/quantize.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kMaxScaleThreads = 256;
constexpr int32_t kTensors = 3;
constexpr int64_t kMaxBlocks = 132 * 8;

/// The bits of magnitudes are ordered as their values are, and a NaN's stand above all.
__device__ uint32_t magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

__device__ int64_t offset_of(const MaxScaleTensor& tensor, int64_t index) {
  int64_t offset = 0;
  for (int32_t d = tensor.rank - 1; d >= 0; --d) {
    offset += index % tensor.shape[d] * tensor.strides[d];
    index /= tensor.shape[d];
  }
  return offset;
}

__global__ void begin_kernel(float* out) {
  out[threadIdx.x] = 0.0f;
}

/// kElements neighbours at a time where the tensor is packed.
template <int32_t kBytes, int32_t kElements>
__global__ void __launch_bounds__(kMaxScaleThreads, 4)
    max_kernel(const __grid_constant__ MaxScaleTensor tensor, uint32_t* __restrict__ out) {
  constexpr int32_t kUnroll = kElements == kWide ? 4 : 1;
  constexpr int64_t kStep = int64_t{kMaxScaleThreads} * kElements;
  uint32_t most = 0;
  for (int64_t first = (int64_t{blockIdx.x} * kMaxScaleThreads * kUnroll + threadIdx.x) * kElements;
       first < tensor.num_elements; first += gridDim.x * kStep * kUnroll) {
    Raw<kBytes, kElements> raw[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int64_t i = min(first + u * kStep, tensor.num_elements - kElements);  // reading twice changes no maximum
      raw[u] = load_raw<kBytes, kElements>(tensor.data + (kElements == kWide ? i : offset_of(tensor, i)) * kBytes);
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      float values[kElements];
      decode(raw[u], tensor.dtype, values);
      for (const float value : values) most = max(most, magnitude_bits(value));
    }
  }
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0) atomicMax(out, most);
}

__global__ void end_kernel(const __grid_constant__ MaxScaleParams params) {
  float& out = params.out[threadIdx.x];
  out = out == 0.0f ? 1.0f : __fdiv_rn(out, params.tensors[threadIdx.x].constant);
}

bool is_packed(const MaxScaleTensor& tensor) {
  int64_t stride = 1;
  for (int32_t d = tensor.rank - 1; d >= 0; --d) {
    if (tensor.shape[d] != 1 && tensor.strides[d] != stride) return false;
    stride *= tensor.shape[d];
  }
  return tensor.num_elements % kWide == 0 && is_wide(tensor.data, tensor.dtype, {});
}

}  // namespace

void enqueue(const MaxScaleParams& params, Stream stream) {
  begin_kernel<<<1, kTensors, 0, native(stream)>>>(params.out);
  check_launch("the scales' beginning");
  for (int32_t i = 0; i < kTensors; ++i) {
    const MaxScaleTensor& tensor = params.tensors[i];
    if (tensor.num_elements == 0) continue;
    const bool packed = is_packed(tensor);
    const bool two = size_of(tensor.dtype) == 2;
    auto* const wide = two ? max_kernel<2, kWide> : max_kernel<4, kWide>;
    auto* const single = two ? max_kernel<2, 1> : max_kernel<4, 1>;
    auto* const kernel = packed ? wide : single;
    const uint32_t grid =
        grid_for(tensor.num_elements, packed ? 4 * kMaxScaleThreads * kWide : 4 * kMaxScaleThreads, kMaxBlocks);
    kernel<<<grid, kMaxScaleThreads, 0, native(stream)>>>(tensor, reinterpret_cast<uint32_t*>(params.out + i));
    check_launch("the largest magnitude");
  }
  end_kernel<<<1, kTensors, 0, native(stream)>>>(params);
  check_launch("the scales' end");
}

}  // namespace folio::inline v0::kernels::cuda
