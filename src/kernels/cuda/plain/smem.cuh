#pragma once

#include <algorithm>

#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/common/numeric_conversion.cuh"

/// Sizes, and what shared memory holds.
namespace folio::inline v0::kernels::cuda::plain {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kRows = 16;    ///< most packed rows of an item
constexpr int32_t kTokens = 32;  ///< keys of a tile: one for each lane
constexpr int32_t kPairs = 32;   ///< components d and d + head_dim_qk / 2 of a tile's keys that are there at a time
constexpr int32_t kKeyStride = 2 * kPairs + 1;  ///< one more, so that lanes meet different banks
constexpr int64_t kUnread = INT64_MIN;          ///< a token that no row sees: its memory may hold anything

/// What is known of each row of an item and of each token of a tile.
struct RowInfo {
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
  float rescale[kRows];     ///< what was accumulated before the tile; folding: before the item
  float here[kRows];        ///< folding: what the item has accumulated
  uint32_t visible[kRows];  ///< of this tile's keys
  float p[kRows][kTokens];
  int64_t key[kTokens];  ///< element, or kUnread
  int64_t value[kTokens];
};

/// What depends on the head dimensions: float32 queries [kRows][head_dim_qk], turned where that is asked for, which
/// give way to results [kRows][head_dim_v]; pairs of the tile's keys [kTokens][kKeyStride]; and, for the turning,
/// quarter turns a position of each pair.
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
  const int32_t floats = kRows * std::max(params.head_dim_qk, params.head_dim_v) + kTokens * kKeyStride;
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

/// The bits of an element of any type, and what they mean. Apart, so that several loads can be under way.
__device__ __forceinline__ uint32_t load_bits(const void* data, DType dtype, int64_t index) {
  switch (size_of(dtype)) {
    case 1: return static_cast<const uint8_t*>(data)[index];
    case 2: return static_cast<const uint16_t*>(data)[index];
    default: return static_cast<const uint32_t*>(data)[index];
  }
}
__device__ __forceinline__ float decode_bits(uint32_t bits, DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return narrow::half_to_float(static_cast<uint16_t>(bits));
    case DType::kBFloat16: return __uint_as_float(bits << 16);
    case DType::kFloat8E5M2: return narrow::half_to_float(static_cast<uint16_t>(bits << 8));
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
