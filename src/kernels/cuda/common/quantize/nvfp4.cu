#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/numeric_conversion.cuh"
#include "kernels/cuda/common/nvfp4.cuh"
#include "kernels/cuda/common/quantize/quantize.hpp"
#include "ptx/math.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kNvfp4Threads = 256;
constexpr int64_t kBlocks = 132 * 5;     // of threads, where a table is made: all at once, so that none is left over
constexpr int64_t kManyItems = 1 << 18;  // fewer are done sooner without a table
constexpr int32_t kHalfBlock = kNvfp4BlockSize / 2;

/// The place of a block of 16 values.
struct BlockPlace {
  int64_t wide;   ///< element
  int64_t codes;  ///< byte
  uint8_t* scale;
};

/// nvfp4_scale_index of numbers that are not negative.
__device__ int64_t scale_index(int64_t row, uint32_t block, uint32_t blocks_per_row) {
  static_assert(kNvfp4TileRows == 128 && kNvfp4TileBlocks == 4);
  const int64_t tile = (row >> 7) * ((blocks_per_row + 3) >> 2) + (block >> 2);
  const auto in_tile = static_cast<uint32_t>(row);
  return (tile << 9) + ((in_tile & 31) << 4 | (in_tile >> 5 & 3) << 2 | (block & 3));
}

__device__ BlockPlace place_of(const Nvfp4Params& params, uint32_t block) {
  const FastDiv& per_token = params.sizes.split.per_token;
  const FastDiv& per_head = params.sizes.split.per_head;
  const uint32_t token = per_token.quotient(block);
  const uint32_t in_token = block - token * per_token.divisor();
  const uint32_t head = params.sizes.num_heads == 1 ? 0 : per_head.quotient(in_token);
  const uint32_t first = (in_token - head * per_head.divisor()) * kNvfp4BlockSize;
  return {token * params.wide.token_stride + head * params.wide.head_stride + first,
          token * params.codes.token_stride + head * params.codes.head_stride + first / 2,
          params.scales + scale_index(params.first_row + token, in_token, per_token.divisor())};
}

/// The three bits of a magnitude stand at the exponent's lowest bits and the mantissa's highest, which is the value
/// times 2^-126: one multiplication puts normals and the one subnormal right.
__device__ float from_e2m1(uint32_t code) {
  const float magnitude = __uint_as_float((code & 7u) << 22) * 0x1p+126f;
  return __uint_as_float(__float_as_uint(magnitude) | (code & 8u) << 28);
}

/// A thread takes a block.
template <bool kAligned>
__global__ void __launch_bounds__(kNvfp4Threads) nvfp4_kernel(const __grid_constant__ Nvfp4Params params) {
  const auto blocks = static_cast<uint32_t>(params.sizes.num_tokens) * params.sizes.split.per_token.divisor();
  for (uint32_t block = blockIdx.x * kNvfp4Threads + threadIdx.x; block < blocks; block += gridDim.x * kNvfp4Threads) {
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
      largest = ptx::max_abs_nan(largest, x[i]);
    }
    const uint8_t stored = e2m1_scale(largest, params.global_scale);
    *place.scale = stored;
    const float scale = fp8_e4m3_to_float(stored);
    uint32_t words[2] = {};
    if (isnan(scale)) {
      words[0] = words[1] = 0x77777777u;
    } else if (scale != 0.0f) {
      const E2m1Limits limits(scale);
#pragma unroll
      for (int32_t i = 0; i < kNvfp4BlockSize; ++i) {
        words[i / 8] |= limits.code(x[i] * params.global_scale) << i % 8 * 4;
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

/// Aligned values of 16 bits: a thread takes kUnroll blocks at a time, and codes are found in a table.
template <bool kBfloat>
__global__ void __launch_bounds__(kNvfp4Threads, 5) narrow_nvfp4_kernel(const __grid_constant__ Nvfp4Params params) {
  constexpr int32_t kUnroll = 2;
  __shared__ E2m1Table table;
  fill_row<kBfloat>(table, static_cast<int32_t>(threadIdx.x), params.global_scale);
  __syncthreads();
  const auto blocks = static_cast<uint32_t>(params.sizes.num_tokens) * params.sizes.split.per_token.divisor();
  const uint32_t step = gridDim.x * kNvfp4Threads;
  for (uint32_t first = blockIdx.x * kNvfp4Threads + threadIdx.x; first < blocks; first += kUnroll * step) {
    uint4 pairs[kUnroll][2];
    BlockPlace places[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      places[u] = place_of(params, min(first + u * step, blocks - 1));
      const auto* const from = reinterpret_cast<const uint4*>(params.wide.data + places[u].wide * 2);
      pairs[u][0] = from[0];
      pairs[u][1] = from[1];
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      if (first + u * step >= blocks) break;
      const uint32_t both = larger_magnitudes(largest_magnitudes(pairs[u][0]), largest_magnitudes(pairs[u][1]));
      const float largest = magnitude_value<kBfloat>(max(both & 0xffffu, both >> 16));
      const uint8_t stored = e2m1_scale(largest, params.global_scale);
      *places[u].scale = stored;
      const uint4 low = table.limits[stored][0];
      const uint4 high = table.limits[stored][1];
      uint2 codes =
          make_uint2(e2m1_codes<kBfloat>(pairs[u][0], low, high), e2m1_codes<kBfloat>(pairs[u][1], low, high));
      if (stored == 0) codes = make_uint2(0, 0);
      if (stored == 0x7f) codes = make_uint2(0x77777777u, 0x77777777u);
      *reinterpret_cast<uint2*>(params.codes.data + places[u].codes) = codes;
    }
  }
}

/// Half a block at a time: eight values, four bytes of codes.
template <bool kAligned>
__global__ void __launch_bounds__(kNvfp4Threads) inverse_kernel(const __grid_constant__ Nvfp4Params params) {
  const Divisor global_scale(params.global_scale);
  const auto halves = static_cast<uint32_t>(params.sizes.num_tokens) * params.sizes.split.per_token.divisor() * 2;
  for (uint32_t half = blockIdx.x * kNvfp4Threads + threadIdx.x; half < halves; half += gridDim.x * kNvfp4Threads) {
    const BlockPlace place = place_of(params, half / 2);
    const uint32_t first = half % 2 * kHalfBlock;
    const auto* const codes = reinterpret_cast<const uint8_t*>(params.codes.data) + place.codes + first / 2;
    uint32_t word = 0;
    if constexpr (kAligned) {
      word = *reinterpret_cast<const uint32_t*>(codes);
    } else {
#pragma unroll
      for (int32_t i = 0; i < kHalfBlock / 2; ++i) word |= static_cast<uint32_t>(codes[i]) << i * 8;
    }
    const float scale = fp8_e4m3_to_float(*place.scale);
    float x[kHalfBlock];
#pragma unroll
    for (int32_t i = 0; i < kHalfBlock; ++i) x[i] = from_e2m1(word >> i * 4) * scale;
    global_scale.divide<kHalfBlock>(x);
    auto* const to = element_at(params.wide.data, params.wide.dtype, place.wide + first);
    if constexpr (kAligned) {
      store_wide(to, params.wide.dtype, x);
    } else {
#pragma unroll
      for (int32_t i = 0; i < kHalfBlock; ++i) {
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
  if (params.wide.head_stride == params.sizes.head_dim && params.codes.head_stride * 2 == params.sizes.head_dim) {
    params.sizes.head_dim *= params.sizes.num_heads;  // heads that follow each other are one
    params.sizes.num_heads = 1;
  }
  params.sizes.split = PieceSplit(params.sizes.head_dim / kNvfp4BlockSize, params.sizes.num_heads);
  const int64_t per_token = params.sizes.split.per_token.divisor();
  auto* quantise = aligned ? nvfp4_kernel<true> : nvfp4_kernel<false>;
  const bool narrow = !params.inverse && aligned && size_of(params.wide.dtype) == 2 &&
                      params.sizes.num_tokens * per_token >= kManyItems;
  if (narrow) {
    quantise = params.wide.dtype == DType::kBFloat16 ? narrow_nvfp4_kernel<true> : narrow_nvfp4_kernel<false>;
  }
  auto* const inverse = aligned ? inverse_kernel<true> : inverse_kernel<false>;
  for_slices(whole.sizes.num_tokens, per_token, [&](int64_t first, int64_t count) {
    params.sizes.num_tokens = count;
    params.wide.data = whole.wide.data + first * whole.wide.token_stride * size_of(whole.wide.dtype);
    params.codes.data = whole.codes.data + first * whole.codes.token_stride;
    params.first_row = whole.first_row + first;
    auto* const kernel = params.inverse ? inverse : quantise;
    const int64_t items = count * per_token * (params.inverse ? 2 : 1);
    const int64_t most = narrow ? kBlocks : int64_t{1} << 20;
    kernel<<<grid_for(items, kNvfp4Threads, most), kNvfp4Threads, 0, native(stream)>>>(params);
    check_launch("NVFP4's quantisation or its inverse");
  });
}

}  // namespace folio::inline v0::kernels::cuda
