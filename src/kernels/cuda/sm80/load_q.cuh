#pragma once

#include "kernels/cuda/sm80/fp8.cuh"

/// Q of a work tile to shared memory: as it is (cp.async), upcast, or as float16 for fp8 keys.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Where 16-byte chunks, eight elements of the 16-bit type, come from.
struct ChunkSource {
  const void* data;
  DType dtype;   ///< T's, or fp8
  bool aligned;  ///< every row begins at a multiple of eight elements' size

  /// cp.async can copy chunks.
  __device__ __forceinline__ bool direct() const { return aligned && !is_fp8(dtype); }
};

/// Eight fp8 values as they are stored.
__device__ __forceinline__ uint2 load_fp8x8(const ChunkSource& source, int64_t at, bool valid) {
  const auto* const from = static_cast<const uint8_t*>(source.data) + at;
  uint2 fp8{};
  if (!valid) return fp8;
  if (source.aligned) return *reinterpret_cast<const uint2*>(from);
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    fp8.x |= uint32_t{from[i]} << (8 * i);
    fp8.y |= uint32_t{from[4 + i]} << (8 * i);
  }
  return fp8;
}

/// Copies the chunk that begins at element `at`, whatever its type and address; zeros where not valid. Slow: not for
/// inner loops.
template <typename T>
__device__ __forceinline__ void copy_any_chunk(uint32_t shared, const ChunkSource& source, int64_t at, bool valid) {
  if (is_fp8(source.dtype)) {
    ptx::st_shared_16(shared, upcast_fp8x8<T>(load_fp8x8(source, at, valid), source.dtype));
    return;
  }
  const T* const from = static_cast<const T*>(source.data) + at;
  if (source.aligned) {
    ptx::cp_async_16(shared, from, valid);
    return;
  }
  uint32_t parts[kChunk / 2] = {};
  if (valid) {
    const auto* const bits = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int32_t i = 0; i < kChunk; ++i) parts[i / 2] |= uint32_t{bits[i]} << (i % 2 * 16);
  }
  ptx::st_shared_16(shared, uint4{parts[0], parts[1], parts[2], parts[3]});
}

/// Writes where Q of each of `num_rows` rows begins, in elements, to storage.query; kNotVisible for rows that the work
/// tile does not have.
template <int32_t Rows>
__device__ __forceinline__ void locate_queries(const AttentionParams& params, SharedStorage<Rows>& storage,
                                               int32_t num_rows) {
  const int32_t row = thread_index();
  if (row >= num_rows) return;
  const RowPlace place = row_place(params, storage.context.work_tile, row);
  storage.query[row] = row < storage.context.num_rows
                           ? place.token * params.q_token_stride + place.q_head * params.q_head_stride
                           : kNotVisible;
}

/// Copies Q to a tile of `num_rows` rows; zeros for rows that the work tile does not have.
template <typename T, int32_t Dim, int32_t Rows>
__device__ __forceinline__ void copy_queries(const AttentionParams& params, const SharedStorage<Rows>& storage,
                                             uint32_t tile, int32_t num_rows) {
  constexpr int32_t kChunks = Dim / kChunk;
  const ChunkSource source{params.q, params.q_dtype, params.q_wide};
  const int32_t thread = thread_index();
  if (source.direct() && params.head_dim_qk == Dim) {
#pragma unroll 2
    for (int32_t i = thread; i < num_rows * kChunks; i += kThreads) {
      const int64_t at = storage.query[i / kChunks];
      const int32_t d = i % kChunks * kChunk;
      ptx::cp_async_16(tile + swizzled_offset(Dim, i / kChunks, i % kChunks),
                       static_cast<const T*>(params.q) + (at != kNotVisible ? at + d : 0), at != kNotVisible);
    }
    return;
  }
#pragma unroll 1
  for (int32_t i = thread; i < num_rows * kChunks; i += kThreads) {
    const int32_t row = i / kChunks;
    const int32_t d = i % kChunks * kChunk;
    const int64_t at = storage.query[row];
    const bool valid = at != kNotVisible && d < params.head_dim_qk;
    copy_any_chunk<T>(tile + swizzled_offset(Dim, row, i % kChunks), source, valid ? at + d : 0, valid);
  }
}

/// Exponent of the largest element of a row of bfloat16 queries after scaling. Elements of 2^-28 of it or more stay
/// exact.
constexpr int32_t kTopExponent = 14;

/// Eight elements of Q in their 16-bit type, fp8 ones as float16; zeros where not valid.
__device__ __forceinline__ uint4 load_queries(const ChunkSource& source, int64_t at, bool valid) {
  if (!valid) return uint4{};
  if (is_fp8(source.dtype)) return upcast_fp8x8<__half>(load_fp8x8(source, at, valid), source.dtype);
  const auto* const from = static_cast<const uint16_t*>(source.data) + at;
  if (source.aligned) return *reinterpret_cast<const uint4*>(from);
  uint32_t parts[kChunk / 2] = {};
#pragma unroll
  for (int32_t i = 0; i < kChunk; ++i) parts[i / 2] |= uint32_t{from[i]} << (i % 2 * 16);
  return {parts[0], parts[1], parts[2], parts[3]};
}

/// Magnitude bits of the larger of two bfloat16; Inf and NaN count as 0.
__device__ __forceinline__ uint32_t magnitude(uint32_t pair) {
  const uint32_t low = pair & 0x7fffu;
  const uint32_t high = pair >> 16 & 0x7fffu;
  return max(low < 0x7f80u ? low : 0u, high < 0x7f80u ? high : 0u);
}
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float scale) {
  return ptx::pack_two<__half>(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
}

/// Converts Q to float16, to a tile of `num_rows` rows. `permuted`: in the order of fp8_query_pair, for keys that are
/// fp8 in shared memory. Eight threads have a row. Writes storage.query_exponent.
template <int32_t Dim, int32_t Rows>
__device__ __forceinline__ void convert_queries(const AttentionParams& params, SharedStorage<Rows>& storage,
                                                uint32_t tile, int32_t num_rows, bool permuted) {
  constexpr int32_t kLanes = 8;
  constexpr int32_t kMine = Dim / kChunk / kLanes;  // chunks of a thread
  const ChunkSource source{params.q, params.q_dtype, params.q_wide};
  const int32_t thread = thread_index();
  const int32_t lane = thread % kLanes;
#pragma unroll 1
  for (int32_t row = thread / kLanes; row < num_rows; row += kThreads / kLanes) {
    const int64_t at = storage.query[row];
    uint4 chunks[kMine];
    uint32_t most = 0;
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      const int32_t d = (lane + i * kLanes) * kChunk;
      chunks[i] = load_queries(source, at + d, at != kNotVisible && d < params.head_dim_qk);
      most = max(max(most, max(magnitude(chunks[i].x), magnitude(chunks[i].y))),
                 max(magnitude(chunks[i].z), magnitude(chunks[i].w)));
    }
    int32_t exponent = 0;
    if (params.q_dtype == DType::kBFloat16) {
#pragma unroll
      for (int32_t step = 1; step < kLanes; step *= 2) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
      }
      if (most != 0) exponent = min(max(static_cast<int32_t>(most >> 7) - 127 - kTopExponent, -120), 120);
      const float scale = __int_as_float((127 - exponent) << 23);
#pragma unroll
      for (int32_t i = 0; i < kMine; ++i) {
        chunks[i] = {scaled_pair(chunks[i].x, scale), scaled_pair(chunks[i].y, scale), scaled_pair(chunks[i].z, scale),
                     scaled_pair(chunks[i].w, scale)};
      }
    }
    if (lane == 0) storage.query_exponent[row] = static_cast<int8_t>(exponent);
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      const int32_t chunk = lane + i * kLanes;
      if (!permuted) {
        ptx::st_shared_16(tile + swizzled_offset(Dim, row, chunk), chunks[i]);
        continue;
      }
      const uint32_t pairs[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const int32_t place_of_pair = fp8_query_pair(chunk % 2 * 4 + j);
        const int32_t target = chunk / 2 * 2 + place_of_pair / 4;
        ptx::st_shared_4(tile + swizzled_offset(Dim, row, target) + place_of_pair % 4 * 4, pairs[j]);
      }
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm80
