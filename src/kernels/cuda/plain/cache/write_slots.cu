#include "kernels/cuda/plain/cache/write_slots.hpp"

#include <cuda_runtime.h>

#include <algorithm>

#include "core/error.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::kernels::cuda::plain {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kMaxGrid = 4096;

__device__ float load_float(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFloat16: return float16_to_float(static_cast<const uint16_t*>(data)[at]);
    case DType::kBFloat16: return bfloat16_to_float(static_cast<const uint16_t*>(data)[at]);
    default: return static_cast<const float*>(data)[at];
  }
}

__device__ void store_float(void* data, DType dtype, int64_t at, float value) {
  switch (dtype) {
    case DType::kFloat16: static_cast<uint16_t*>(data)[at] = float_to_float16(value); break;
    case DType::kBFloat16: static_cast<uint16_t*>(data)[at] = float_to_bfloat16(value); break;
    case DType::kFloat8E4M3: static_cast<uint8_t*>(data)[at] = float_to_fp8_e4m3(value); break;
    case DType::kFloat8E5M2: static_cast<uint8_t*>(data)[at] = float_to_fp8_e5m2(value); break;
    default: static_cast<float*>(data)[at] = value; break;
  }
}

__device__ float scale_of(const Scale& scale, int32_t head) {
  if (scale.data == nullptr) return scale.value;
  return scale.data[scale.granularity == ScaleGranularity::kPerHead ? head : 0];
}

/// Elements of one token's half. Equal types are copied bit for bit.
__device__ void write_token(const WriteHalf& half, DType cache_dtype, int32_t num_heads, int64_t token, int64_t page,
                            int64_t in_page) {
  const bool copy = half.input_dtype == cache_dtype;
  const int32_t bytes = cache_dtype == DType::kFloat32 ? 4 : (is_fp8(cache_dtype) ? 1 : 2);
  for (int32_t i = threadIdx.x; i < num_heads * half.head_dim; i += kThreads) {
    const int32_t head = i / half.head_dim;
    const int32_t d = i % half.head_dim;
    const int64_t from = token * half.input_token_stride + head * half.input_head_stride + d;
    const int64_t to = page * half.strides.page + in_page * half.strides.token + head * half.strides.head + d;
    if (!copy) {
      const float value = load_float(half.input, half.input_dtype, from);
      store_float(half.cache, cache_dtype, to, is_fp8(cache_dtype) ? value / scale_of(half.scale, head) : value);
    } else if (bytes == 4) {
      static_cast<uint32_t*>(half.cache)[to] = static_cast<const uint32_t*>(half.input)[from];
    } else if (bytes == 2) {
      static_cast<uint16_t*>(half.cache)[to] = static_cast<const uint16_t*>(half.input)[from];
    } else {
      static_cast<uint8_t*>(half.cache)[to] = static_cast<const uint8_t*>(half.input)[from];
    }
  }
}

__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ WriteParams params) {
  for (int64_t token = blockIdx.x; token < params.num_slots; token += gridDim.x) {
    const int64_t slot = params.slots[token];
    if (slot < 0 || slot >= params.slot_limit) continue;
    const int64_t page = slot / params.page_size;
    const int64_t in_page = slot % params.page_size;
    write_token(params.k, params.cache_dtype, params.num_kv_heads, token, page, in_page);
    if (params.has_v) write_token(params.v, params.cache_dtype, params.num_kv_heads, token, page, in_page);
  }
}

}  // namespace

void write_slots(const WriteParams& params, Stream stream) {
  if (params.num_slots == 0) return;
  const auto grid = static_cast<uint32_t>(std::min<int64_t>(params.num_slots, kMaxGrid));
  write_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(params);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching the cache write: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda::plain
