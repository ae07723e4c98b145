#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/quantize/quantize.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr float kLargestE2m1 = 6.0f;
constexpr int32_t kHalfBlock = kNvfp4BlockSize / 2;

/// The place of a block of 16 values.
struct BlockPlace {
  int64_t wide;   ///< element
  int64_t codes;  ///< byte
  uint8_t* scale;
};

__device__ BlockPlace place_of(const Nvfp4Params& params, int64_t block, int32_t per_head) {
  const int32_t per_token = per_head * params.sizes.num_heads;
  const int64_t token = block / per_token;
  const auto in_token = static_cast<int32_t>(block % per_token);
  const int32_t head = in_token / per_head;
  const int32_t first = in_token % per_head * kNvfp4BlockSize;
  return {token * params.wide.token_stride + head * params.wide.head_stride + first,
          token * params.codes.token_stride + head * params.codes.head_stride + first / 2,
          params.scales + nvfp4_scale_index(params.first_row + token, in_token, per_token)};
}

/// Thresholds between e2m1's values; a tie goes to the even code, which >= gives to codes that are even.
__device__ uint32_t to_e2m1(float value) {
  const float magnitude = fabsf(value);
  uint32_t code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                  (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
  if (isnan(value)) return 7;
  return code | (__float_as_uint(value) >> 28 & 8u);
}

/// A thread takes a block.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) nvfp4_kernel(const __grid_constant__ Nvfp4Params params) {
  const int32_t per_head = params.sizes.head_dim / kNvfp4BlockSize;
  const int64_t blocks = params.sizes.num_tokens * params.sizes.num_heads * per_head;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x; block < blocks; block += step) {
    const BlockPlace place = place_of(params, block, per_head);
    const std::byte* const from = element_at<const std::byte>(params.wide.data, params.wide.dtype, place.wide);
    float x[kNvfp4BlockSize];
    if constexpr (kAligned) {
      load_wide(from, params.wide.dtype, x);
      load_wide(element_at(from, params.wide.dtype, kHalfBlock), params.wide.dtype, x + kHalfBlock);
    } else {
#pragma unroll
      for (int32_t i = 0; i < kNvfp4BlockSize; ++i) {
        x[i] = load_one(element_at(from, params.wide.dtype, i), params.wide.dtype);
      }
    }
    float largest = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kNvfp4BlockSize; ++i) {
      const float magnitude = fabsf(x[i]);
      if (magnitude > largest || isnan(magnitude)) largest = magnitude;  // nothing is greater than a NaN: it stays
    }
    const auto stored =
        static_cast<uint8_t>(narrow::floats_to_e4m3(__fdiv_rn(params.global_scale * largest, kLargestE2m1), 0.0f));
    *place.scale = stored;
    const float scale = fp8_e4m3_to_float(stored);
    uint32_t words[2] = {};
    if (scale != 0.0f) {
#pragma unroll
      for (int32_t i = 0; i < kNvfp4BlockSize; ++i) {
        words[i / 8] |= to_e2m1(__fdiv_rn(x[i] * params.global_scale, scale)) << i % 8 * 4;
      }
    }
    auto* const codes = reinterpret_cast<uint8_t*>(params.codes.data) + place.codes;
    if constexpr (kAligned) {
      *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
      for (int32_t i = 0; i < kHalfBlock; ++i) codes[i] = static_cast<uint8_t>(words[i / 4] >> i % 4 * 8);
    }
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) inverse_kernel(const __grid_constant__ Nvfp4Params params) {
  const int32_t per_head = params.sizes.head_dim / kNvfp4BlockSize;
  const int64_t blocks = params.sizes.num_tokens * params.sizes.num_heads * per_head;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x; block < blocks; block += step) {
    const BlockPlace place = place_of(params, block, per_head);
    const auto* const codes = reinterpret_cast<const uint8_t*>(params.codes.data) + place.codes;
    uint32_t words[2] = {};
    if constexpr (kAligned) {
      const uint2 both = *reinterpret_cast<const uint2*>(codes);
      words[0] = both.x;
      words[1] = both.y;
    } else {
#pragma unroll
      for (int32_t i = 0; i < kHalfBlock; ++i) words[i / 4] |= static_cast<uint32_t>(codes[i]) << i % 4 * 8;
    }
    const float scale = fp8_e4m3_to_float(*place.scale);
    float x[kNvfp4BlockSize];
#pragma unroll
    for (int32_t i = 0; i < kNvfp4BlockSize; ++i) {
      const float value = fp4_e2m1_to_float(static_cast<uint8_t>(words[i / 8] >> i % 8 * 4));
      x[i] = __fdiv_rn(value * scale, params.global_scale);
    }
    auto* const to = element_at(params.wide.data, params.wide.dtype, place.wide);
    if constexpr (kAligned) {
      store_wide(to, params.wide.dtype, x);
      store_wide(element_at(to, params.wide.dtype, kHalfBlock), params.wide.dtype, x + kHalfBlock);
    } else {
#pragma unroll
      for (int32_t i = 0; i < kNvfp4BlockSize; ++i) {
        store_one(element_at(to, params.wide.dtype, i), params.wide.dtype, x[i]);
      }
    }
  }
}

}  // namespace

void enqueue(const Nvfp4Params& params, Stream stream) {
  const int64_t blocks = params.sizes.num_tokens * params.sizes.num_heads * (params.sizes.head_dim / kNvfp4BlockSize);
  if (blocks == 0) return;
  const bool aligned =
      is_wide(params.wide.data, params.wide.dtype, {params.wide.token_stride, params.wide.head_stride}) &&
      is_wide(params.codes.data, DType::kFloat4E2M1x2, {params.codes.token_stride, params.codes.head_stride});
  const uint32_t grid = grid_for(blocks, kThreads);
  if (params.inverse) {
    auto* const kernel = aligned ? inverse_kernel<true> : inverse_kernel<false>;
    kernel<<<grid, kThreads, 0, native(stream)>>>(params);
  } else {
    auto* const kernel = aligned ? nvfp4_kernel<true> : nvfp4_kernel<false>;
    kernel<<<grid, kThreads, 0, native(stream)>>>(params);
  }
  check_launch("NVFP4's quantisation or its inverse");
}

}  // namespace folio::inline v0::kernels::cuda
