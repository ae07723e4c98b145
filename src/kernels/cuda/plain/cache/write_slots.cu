#include "kernels/cuda/plain/cache/write_slots.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

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

/// Copies rows of equal type in pieces of one `Piece`, which divides everything that is added to an address.
template <typename Piece>
__device__ void copy_token(const WriteHalf& half, int32_t element_bytes, int32_t num_heads, int64_t from, int64_t to) {
  const int32_t pieces = half.head_dim * element_bytes / static_cast<int32_t>(sizeof(Piece));
  const auto* const input = static_cast<const std::byte*>(half.input);
  auto* const cache = static_cast<std::byte*>(half.cache);
  for (int32_t i = threadIdx.x; i < num_heads * pieces; i += kThreads) {
    const int32_t head = i / pieces;
    const int64_t piece = i % pieces;
    const int64_t source = (from + head * half.input_head_stride) * element_bytes;
    const int64_t target = (to + head * half.strides.head) * element_bytes;
    reinterpret_cast<Piece*>(cache + target)[piece] = reinterpret_cast<const Piece*>(input + source)[piece];
  }
}

/// One token's half. Equal types are copied bit for bit.
__device__ void write_token(const WriteHalf& half, DType cache_dtype, int32_t num_heads, int64_t token, int64_t page,
                            int64_t in_page) {
  const int64_t from = token * half.input_token_stride;
  const int64_t to = page * half.strides.page + in_page * half.strides.token;
  if (half.input_dtype == cache_dtype) {
    switch (half.piece_bytes) {
      case 16: return copy_token<uint4>(half, size_of(cache_dtype), num_heads, from, to);
      case 4: return copy_token<uint32_t>(half, size_of(cache_dtype), num_heads, from, to);
      case 2: return copy_token<uint16_t>(half, size_of(cache_dtype), num_heads, from, to);
      default: return copy_token<uint8_t>(half, size_of(cache_dtype), num_heads, from, to);
    }
  }
  for (int32_t i = threadIdx.x; i < num_heads * half.head_dim; i += kThreads) {
    const int32_t head = i / half.head_dim;
    const int32_t d = i % half.head_dim;
    const float value = load_float(half.input, half.input_dtype, from + head * half.input_head_stride + d);
    const int64_t at = to + head * half.strides.head + d;
    store_float(half.cache, cache_dtype, at, is_fp8(cache_dtype) ? value / scale_of(half.scale, head) : value);
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

/// The widest piece of memory that every row of both sides begins and ends at a multiple of.
int32_t piece_bytes(const WriteHalf& half, DType cache_dtype) {
  const int64_t bytes = size_of(cache_dtype);
  auto all = reinterpret_cast<uintptr_t>(half.input) | reinterpret_cast<uintptr_t>(half.cache);
  for (const int64_t elements : {half.input_token_stride, half.input_head_stride, half.strides.page, half.strides.token,
                                 half.strides.head, int64_t{half.head_dim}}) {
    all |= static_cast<uintptr_t>(elements * bytes);
  }
  return all % 16 == 0 ? 16 : (all % 4 == 0 ? 4 : static_cast<int32_t>(all % 2 == 0 ? 2 : 1));
}

}  // namespace

void write_slots(const WriteParams& given, Stream stream) {
  if (given.num_slots == 0) return;
  WriteParams params = given;
  params.k.piece_bytes = piece_bytes(params.k, params.cache_dtype);
  params.v.piece_bytes = piece_bytes(params.v, params.cache_dtype);
  const auto grid = static_cast<uint32_t>(std::min<int64_t>(params.num_slots, kMaxGrid));
  write_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(params);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching the cache write: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda::plain
