#pragma once

#include <algorithm>

#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/common/numeric_conversion.cuh"

/// Tile shapes, and what shared memory holds.
namespace folio::inline v0::kernels::cuda::plain {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kRows = 16;                   ///< most packed rows of a work tile
constexpr int32_t kKvTile = 32;                 ///< tokens of a KV tile: one for each lane
constexpr int32_t kPairs = 32;                  ///< pairs d and d + head_dim_qk / 2 of K in shared memory at a time
constexpr int32_t kKeyStride = 2 * kPairs + 1;  ///< padded: lanes read different banks
constexpr int64_t kUnread = INT64_MIN;          ///< a token that no row sees: its memory may hold anything

/// The rows of a work tile and the tokens of a KV tile.
struct SharedStorage {
  int64_t position[kRows];
  int64_t mask_bit[kRows];       ///< custom mask: local token j stands at bit mask_bit + j,
  int32_t mask_begin[kRows];     ///< if j >= mask_begin; earlier tokens are visible
  int32_t visible_begin[kRows];  ///< local tokens
  int32_t visible_end[kRows];
  float logit_scale[kRows];  ///< to natural units
  float value_scale[kRows];
  float alibi_slope[kRows];
  float max[kRows];
  float sum[kRows];
  float saved_max[kRows];
  float saved_sum[kRows];
  float rescale[kRows];     ///< of O before the KV tile; in fold: before the work tile
  float here[kRows];        ///< fold: factor of the work tile
  uint32_t visible[kRows];  ///< a bit for each token of the KV tile
  float p[kRows][kKvTile];
  int64_t key[kKvTile];  ///< element, or kUnread
  int64_t value[kKvTile];
};

/// What depends on the head dimensions: Q as float32 [kRows][head_dim_qk], rotated if asked for, which gives way to O
/// [kRows][head_dim_v]; pairs of K [kKvTile][kKeyStride]; for rotary embeddings, the quarter turns of each pair by
/// position.
struct DynamicMemory {
  double* quarter_turns;
  float* q;
  float* k;

  __device__ DynamicMemory(unsigned char* memory, const AttentionParams& params)
      : quarter_turns(reinterpret_cast<double*>(memory)),
        q(reinterpret_cast<float*>(quarter_turns + (params.rope.on ? params.head_dim_qk / 2 : 0))),
        k(q + kRows * max(params.head_dim_qk, params.head_dim_v)) {}
};
inline int32_t dynamic_bytes(const AttentionParams& params) {
  const int32_t floats = kRows * std::max(params.head_dim_qk, params.head_dim_v) + kKvTile * kKeyStride;
  return 4 * floats + (params.rope.on ? 8 * (params.head_dim_qk / 2) : 0);
}

/// A token's page and its place in it; ragged: page 0 and the token of the tensor.
struct Place {
  int64_t page = 0;
  int64_t in_page = 0;
  __device__ int64_t in(const KvStrides& strides, int32_t head) const {
    return page * strides.page + in_page * strides.token + head * strides.head;
  }
};
__device__ inline Place locate(const SegmentParams& segment, const scheduler::WorkTile& item, int32_t token) {
  if (!segment.paged) return {0, int64_t{segment.indptr[item.kv_row]} + token};
  const int32_t column = token / segment.page_size;
  const int64_t begin = segment.indptr != nullptr ? int64_t{segment.indptr[item.kv_row]}
                                                  : item.kv_row * segment.row_stride + segment.first_column;
  return {segment.indices[begin + column], token - column * segment.page_size};
}

/// The bits of an element of any type. Apart from decode_bits, so that several loads can be in flight.
__device__ __forceinline__ uint32_t load_bits(const void* data, DType dtype, int64_t index) {
  switch (size_of(dtype)) {
    case 1: return static_cast<const uint8_t*>(data)[index];
    case 2: return static_cast<const uint16_t*>(data)[index];
    default: return static_cast<const uint32_t*>(data)[index];
  }
}
__device__ __forceinline__ float decode_bits(uint32_t bits, DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return ptx::upcast_f16(static_cast<uint16_t>(bits));
    case DType::kBFloat16: return __uint_as_float(bits << 16);
    case DType::kFloat8E5M2: return ptx::upcast_f16(static_cast<uint16_t>(bits << 8));
    case DType::kFloat8E4M3: {
      // As a float32 with this exponent and mantissa, 2^120 times smaller, subnormal numbers included.
      const float value = __uint_as_float((bits & 0x7fu) << 20) * 0x1p+120f;
      const uint32_t magnitude = (bits & 0x7fu) == 0x7fu ? 0x7fc00000u : __float_as_uint(value);
      return __uint_as_float(magnitude | (bits & 0x80u) << 24);
    }
    default: return __uint_as_float(bits);
  }
}

}  // namespace folio::inline v0::kernels::cuda::plain
