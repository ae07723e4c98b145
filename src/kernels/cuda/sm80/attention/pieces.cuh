#pragma once

#include <cuda_fp8.h>

#include "kernels/cuda/sm80/attention/shape.hpp"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

/// Eight elements of a query, key or value on their way to shared memory, where all are of the 16-bit type `T`.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Where pieces come from.
struct PieceSource {
  const void* data;
  DType dtype;   ///< T's, or fp8
  bool aligned;  ///< every row begins at a multiple of eight elements' size

  /// Pieces may be copied as they are, asynchronously.
  __device__ __forceinline__ bool direct() const { return aligned && !is_fp8(dtype); }
};

/// Eight fp8 codes as they are stored.
__device__ __forceinline__ uint2 load_codes(const PieceSource& source, int64_t at, bool valid) {
  const auto* const from = static_cast<const uint8_t*>(source.data) + at;
  uint2 codes{};
  if (!valid) return codes;
  if (source.aligned) return *reinterpret_cast<const uint2*>(from);
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    codes.x |= uint32_t{from[i]} << (8 * i);
    codes.y |= uint32_t{from[4 + i]} << (8 * i);
  }
  return codes;
}

/// Two fp8 codes widened: exactly, NaN and infinities too.
template <typename T>
__device__ __forceinline__ uint32_t widen_two(uint32_t codes, __nv_fp8_interpretation_t kind) {
  const __half2 values = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), kind);
  const float2 wide = __half22float2(values);
  return ptx::pack_two<T>(wide.x, wide.y);
}

/// Eight codes widened.
template <typename T>
__device__ __forceinline__ uint4 widen_codes(const uint2& codes, DType dtype) {
  if (dtype == DType::kFloat8E5M2) {
    return {widen_two<T>(codes.x & 0xffffu, __NV_E5M2), widen_two<T>(codes.x >> 16, __NV_E5M2),
            widen_two<T>(codes.y & 0xffffu, __NV_E5M2), widen_two<T>(codes.y >> 16, __NV_E5M2)};
  }
  return {widen_two<T>(codes.x & 0xffffu, __NV_E4M3), widen_two<T>(codes.x >> 16, __NV_E4M3),
          widen_two<T>(codes.y & 0xffffu, __NV_E4M3), widen_two<T>(codes.y >> 16, __NV_E4M3)};
}

/// The piece that begins at element `at`, whatever its type and address; zeros where not valid. Not for inner loops.
template <typename T>
__device__ __forceinline__ void copy_any_piece(uint32_t shared, const PieceSource& source, int64_t at, bool valid) {
  if (is_fp8(source.dtype)) {
    ptx::st_shared_16(shared, widen_codes<T>(load_codes(source, at, valid), source.dtype));
    return;
  }
  const T* const from = static_cast<const T*>(source.data) + at;
  if (source.aligned) {
    ptx::cp_async_16(shared, from, valid);
    return;
  }
  uint32_t parts[kPiece / 2] = {};
  if (valid) {
    const auto* const bits = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int32_t i = 0; i < kPiece; ++i) parts[i / 2] |= uint32_t{bits[i]} << (i % 2 * 16);
  }
  ptx::st_shared_16(shared, uint4{parts[0], parts[1], parts[2], parts[3]});
}

}  // namespace folio::inline v0::kernels::cuda::sm80
