#pragma once

#include "kernels/cuda/common/epilogue.cuh"
#include "ptx/mma.cuh"
#include "scheduler/mask_bounds.hpp"

/// How an epilogue writes finished rows.
namespace folio::inline v0::kernels::cuda::sm90 {

/// Keeps `state` in local memory: the compiler no longer knows its address and cannot promote it to registers.
template <typename State>
__device__ __forceinline__ State& in_local_memory(State& state) {
  State* address = &state;
  asm volatile("" : "+l"(address)::"memory");
  return *address;
}

/// Writes two neighbouring components of a finished row, of any dtype and address. A call, not inlined: of its many
/// paths one is taken, and the instruction cache would still fetch the others.
__device__ FOLIO_CALLED inline void write_any_pair(const AttentionParams& params, int64_t at, float x, float y) {
  if (is_fp8(params.out_dtype)) {
    auto* const to = static_cast<uint8_t*>(params.out) + at;
    const float scale = scale_at(params.out_scale, 0, 0);
    const bool e4m3 = params.out_dtype == DType::kFloat8E4M3;
    to[0] = e4m3 ? float_to_fp8_e4m3(x / scale) : float_to_fp8_e5m2(x / scale);
    to[1] = e4m3 ? float_to_fp8_e4m3(y / scale) : float_to_fp8_e5m2(y / scale);
    return;
  }
  if (params.out_dtype == DType::kFloat32) {
    auto* const to = static_cast<float*>(params.out) + at;
    to[0] = x;
    to[1] = y;
    return;
  }
  auto* const to = static_cast<uint16_t*>(params.out) + at;
  const uint32_t pair =
      params.out_dtype == DType::kFloat16 ? ptx::pack_two<__half>(x, y) : ptx::pack_two<__nv_bfloat16>(x, y);
  to[0] = static_cast<uint16_t>(pair);
  to[1] = static_cast<uint16_t>(pair >> 16);
}

/// The same; aligned pairs of 16 bits take a short path without the call.
__device__ __forceinline__ void write_pair(const AttentionParams& params, int64_t at, float x, float y) {
  const bool is_half = params.out_dtype == DType::kFloat16;
  if (!params.out_pairs || (!is_half && params.out_dtype != DType::kBFloat16)) {
    return write_any_pair(params, at, x, y);
  }
  const uint32_t pair = is_half ? ptx::pack_two<__half>(x, y) : ptx::pack_two<__nv_bfloat16>(x, y);
  *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(params.out) + at) = pair;
}

}  // namespace folio::inline v0::kernels::cuda::sm90
