#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/sm90/common/config.hpp"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

/// Elements of keys and values in shared memory: the 16-bit type `T` of the MMA, or fp8 data that is dequantized in
/// front of it.
namespace folio::inline v0::kernels::cuda::sm90 {

/// Upcasts the four fp8 values of `word` to two pairs of float16. Exact.
template <Fp8 kFp8>
__device__ __forceinline__ void upcast_fp8x4(uint32_t word, uint32_t& low, uint32_t& high) {
  if constexpr (kFp8 == Fp8::kE4M3) {
    ptx::upcast_e4m3x4(word, low, high);
  } else {
    ptx::upcast_e5m2x4(word, low, high);
  }
}

/// Upcasts two fp8 values to a pair of `T`. Exact, NaN and Inf included.
template <typename T>
__device__ __forceinline__ uint32_t upcast_fp8x2(uint32_t pair, __nv_fp8_interpretation_t kind) {
  const __half2 values = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), kind);
  const float2 wide = __half22float2(values);
  return ptx::pack_two<T>(wide.x, wide.y);
}

/// fp8 data in shared memory is in rows of 128 bytes in the 128-byte swizzle, as TMA leaves it. It becomes two rows of
/// 16-bit elements in the same swizzle, 64 components each. The lanes of a warp have eight rows (an atom of the
/// swizzle) of 64 components at a time: this is the row and the chunk of 16 bytes of a lane. Eight lanes share an
/// access to shared memory. Their rows differ in the first and the last bit, so that neither reads of fp8 data nor
/// writes of 16-bit elements, to every other chunk of a row, have bank conflicts.
struct Fp8Lane {
  int32_t row;
  int32_t chunk;
  __device__ __forceinline__ explicit Fp8Lane(int32_t lane) : row((lane / 8) ^ (lane / 4 % 2 * 5)), chunk(lane % 4) {}
};

/// Byte offset of a lane's chunk in an atom of fp8 data. `half`: 0, or 1 for the chunk 64 components further on.
__device__ __forceinline__ uint32_t fp8_offset(const Fp8Lane& lane, int32_t half) {
  return static_cast<uint32_t>(lane.row * 128 + ((4 * half + lane.chunk) ^ lane.row) * 16);
}

// Where K and V are dequantized to float16, bfloat16 Q becomes float16, too: a row divided by a power of two, so that
// its largest exponent is 14. Whatever is at least 2^-28 of the row's largest stays exact, except where the whole row
// is below 2^-46. The row's scale is multiplied by that power.

/// The largest magnitude, as bits, of a chunk of bfloat16 and of `most`. NaN and Inf do not count.
__device__ __forceinline__ uint32_t max_magnitude(const uint4& chunk, uint32_t most) {
#pragma unroll
  for (const uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w}) {
    const uint32_t low = pair & 0x7fffu;
    const uint32_t high = pair >> 16 & 0x7fffu;
    most = max(most, max(low < 0x7f80u ? low : 0u, high < 0x7f80u ? high : 0u));
  }
  return most;
}
/// The power of two that a row is divided by. `most`: the row's max_magnitude.
__device__ __forceinline__ int32_t float16_row_exponent(uint32_t most) {
  constexpr int32_t kMaxExponent = 14;
  constexpr int32_t kMinRowExponent = -60;
  if (most == 0) return 0;
  return min(max(static_cast<int32_t>(most >> 7) - 127 - kMaxExponent, kMinRowExponent), 120);
}
__device__ __forceinline__ float power_of_two(int32_t exponent) {
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}
/// Divides a chunk of bfloat16 by 2^exponent and makes it float16.
__device__ __forceinline__ void to_float16(uint4& chunk, int32_t exponent) {
  const float by = power_of_two(-exponent);
#pragma unroll
  for (uint32_t* const pair : {&chunk.x, &chunk.y, &chunk.z, &chunk.w}) {
    *pair = ptx::pack_two<__half>(__uint_as_float(*pair << 16) * by, __uint_as_float(*pair & 0xffff0000u) * by);
  }
}

/// Divides a chunk of bfloat16 by 2^exponent.
__device__ __forceinline__ void divide_bfloat16(uint4& chunk, int32_t exponent) {
  const float by = power_of_two(-exponent);
#pragma unroll
  for (uint32_t* const pair : {&chunk.x, &chunk.y, &chunk.z, &chunk.w}) {
    *pair = ptx::pack_two<__nv_bfloat16>(__uint_as_float(*pair << 16) * by, __uint_as_float(*pair & 0xffff0000u) * by);
  }
}

/// Two pairs of float16 as pairs of `T`. Exact for what was fp8.
template <typename T>
__device__ __forceinline__ void from_float16(uint32_t& first, uint32_t& second) {
  if constexpr (!std::is_same_v<T, __half>) {
    for (uint32_t* const pair : {&first, &second}) {
      const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(pair));
      *pair = ptx::pack_two<T>(wide.x, wide.y);
    }
  }
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t pair, __half2 by) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&pair), by);
  return *reinterpret_cast<const uint32_t*>(&product);
}

/// A lane's chunk of fp8 data as 16-bit elements.
struct Dequantized {
  uint4 first;
  uint4 second;
};
template <typename T, Fp8 kFp8>
__device__ __forceinline__ Dequantized dequantized(const uint4& fp8) {
  Dequantized chunk;
  auto& [first, second] = chunk;
  upcast_fp8x4<kFp8>(fp8.x, first.x, first.y);
  upcast_fp8x4<kFp8>(fp8.y, first.z, first.w);
  upcast_fp8x4<kFp8>(fp8.z, second.x, second.y);
  upcast_fp8x4<kFp8>(fp8.w, second.z, second.w);
  from_float16<T>(first.x, first.y);
  from_float16<T>(first.z, first.w);
  from_float16<T>(second.x, second.y);
  from_float16<T>(second.z, second.w);
  return chunk;
}
/// The same, e4m3 values times `scale`, rounded to `T`. float16: so is `scale`.
template <typename T>
__device__ __forceinline__ Dequantized dequantized(const uint4& fp8, float scale) {
  Dequantized chunk;
  const uint32_t words[4] = {fp8.x, fp8.y, fp8.z, fp8.w};
  uint32_t pairs[8];
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) upcast_fp8x4<Fp8::kE4M3>(words[i], pairs[2 * i], pairs[2 * i + 1]);
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 by = __float2half2_rn(scale);
#pragma unroll
    for (uint32_t& pair : pairs) pair = multiply_halves(pair, by);
  } else {
#pragma unroll
    for (uint32_t& pair : pairs) {
      const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      pair = ptx::pack_two<T>(wide.x * scale, wide.y * scale);
    }
  }
  chunk.first = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
  chunk.second = uint4{pairs[4], pairs[5], pairs[6], pairs[7]};
  return chunk;
}

/// Writes it to the atom of 16-bit elements at `atom`.
__device__ __forceinline__ void store_dequantized(uint32_t atom, const Fp8Lane& lane, const Dequantized& chunk) {
  const uint32_t row = atom + static_cast<uint32_t>(lane.row * 128);
  const auto at = static_cast<uint32_t>(((2 * lane.chunk) ^ lane.row) * 16);
  ptx::st_shared_16(row + at, chunk.first);
  ptx::st_shared_16(row + (at ^ 16u), chunk.second);
}

}  // namespace folio::inline v0::kernels::cuda::sm90
