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

__device__ BlockPlace place_of(const Nvfp4Params& params, uint32_t block) {
  const PieceIndex at = params.sizes.split.at(block);
  const uint32_t first = at.piece * kNvfp4BlockSize;
  const uint32_t per_head = params.sizes.split.per_head.divisor();
  return {at.token * params.wide.token_stride + at.head * params.wide.head_stride + first,
          at.token * params.codes.token_stride + at.head * params.codes.head_stride + first / 2,
          params.scales + nvfp4_scale_index(params.first_row + at.token, at.head * per_head + at.piece,
                                            params.sizes.split.per_token.divisor())};
}

/// Thresholds between e2m1's values; a tie goes to the even code, which >= gives to codes that are even.
__device__ uint32_t to_e2m1(float value) {
  const float magnitude = fabsf(value);
  uint32_t code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                  (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
  if (isnan(value)) return 7;
  return code | (__float_as_uint(value) >> 28 & 8u);
}

/// The three bits of a magnitude stand at the exponent's lowest bits and the mantissa's highest, which is the value
/// times 2^-126: one multiplication puts normals and the one subnormal right.
__device__ float from_e2m1(uint32_t code) {
  const float magnitude = __uint_as_float((code & 7u) << 22) * 0x1p+126f;
  return __uint_as_float(__float_as_uint(magnitude) | (code & 8u) << 28);
}

/// A thread takes a block.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) nvfp4_kernel(const __grid_constant__ Nvfp4Params params) {
  const auto blocks = static_cast<uint32_t>(params.sizes.num_tokens) * params.sizes.split.per_token.divisor();
  for (uint32_t block = blockIdx.x * kThreads + threadIdx.x; block < blocks; block += gridDim.x * kThreads) {
    const BlockPlace place = place_of(params, block);
    const std::byte* const from = element_at<const std::byte>(params.wide.data, params.wide.dtype, place.wide);
    float x[kNvfp4BlockSize];
    if constexpr (kAligned) {
      load_floats<kWide>(from, params.wide.dtype, x);
      load_floats<kWide>(element_at(from, params.wide.dtype, kHalfBlock), params.wide.dtype, x + kHalfBlock);
    } else {
#pragma unroll
      for (int32_t i = 0; i < kNvfp4BlockSize; ++i) {
        load_floats<1>(element_at(from, params.wide.dtype, i), params.wide.dtype, x + i);
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
      for (float& value : x) value *= params.global_scale;
      divide_all<kNvfp4BlockSize>(x, scale);
#pragma unroll
      for (int32_t i = 0; i < kNvfp4BlockSize; ++i) words[i / 8] |= to_e2m1(x[i]) << i % 8 * 4;
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
  const auto blocks = static_cast<uint32_t>(params.sizes.num_tokens) * params.sizes.split.per_token.divisor();
  for (uint32_t block = blockIdx.x * kThreads + threadIdx.x; block < blocks; block += gridDim.x * kThreads) {
    const BlockPlace place = place_of(params, block);
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
      x[i] = from_e2m1(words[i / 8] >> i % 8 * 4) * scale;
    }
    divide_all<kNvfp4BlockSize>(x, params.global_scale);
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

void enqueue(const Nvfp4Params& whole, Stream stream) {
  Nvfp4Params params = whole;
  const bool aligned =
      is_wide(params.wide.data, params.wide.dtype, {params.wide.token_stride, params.wide.head_stride}) &&
      is_wide(params.codes.data, DType::kFloat4E2M1x2, {params.codes.token_stride, params.codes.head_stride});
  params.sizes.split = PieceSplit(params.sizes.head_dim / kNvfp4BlockSize, params.sizes.num_heads);
  const int64_t per_token = params.sizes.split.per_token.divisor();
  auto* const quantise = aligned ? nvfp4_kernel<true> : nvfp4_kernel<false>;
  auto* const inverse = aligned ? inverse_kernel<true> : inverse_kernel<false>;
  for_slices(whole.sizes.num_tokens, per_token, [&](int64_t first, int64_t count) {
    params.sizes.num_tokens = count;
    params.wide.data = whole.wide.data + first * whole.wide.token_stride * size_of(whole.wide.dtype);
    params.codes.data = whole.codes.data + first * whole.codes.token_stride;
    params.first_row = whole.first_row + first;
    auto* const kernel = params.inverse ? inverse : quantise;
    kernel<<<grid_for(count * per_token, kThreads), kThreads, 0, native(stream)>>>(params);
    check_launch("NVFP4's quantisation or its inverse");
  });
}

}  // namespace folio::inline v0::kernels::cuda
