#include <algorithm>

#include "kernels/cuda/sm90/decode/tensor_map_encoder.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {
namespace {

/// Whether every head of every token begins at a multiple of 16 bytes.
bool is_aligned(const void* data, const KvStrides& strides, int32_t bytes) {
  const int64_t all = strides.page | strides.token | strides.head;
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && all * bytes % 16 == 0;
}

/// Dimensions, innermost first: what of a token lies side by side in a tile, tokens of a page, the rest of a token's
/// components, heads, pages. A box is all components of one head of `box` tokens.
bool make_map(CUtensorMap& map, const SegmentParams& segment, const void* data, const KvStrides& strides,
              int32_t head_dim, int32_t bytes, int32_t num_heads, int32_t box) {
  const TensorMapEncoder encode = tensor_map_encoder();
  if (encode == nullptr || !is_aligned(data, strides, bytes)) return false;
  for (const int64_t stride : {strides.token, strides.head, strides.page}) {
    if (stride < 0 || stride >= (int64_t{1} << 40) / bytes) return false;
  }
  const int32_t width = side_by_side(head_dim, bytes);
  const int32_t columns = width / bytes;
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(segment.page_size),
                              static_cast<cuuint64_t>(head_dim / columns), static_cast<cuuint64_t>(num_heads),
                              static_cast<cuuint64_t>(std::max<int64_t>(segment.num_pages, 1))};
  const cuuint64_t steps[4] = {static_cast<cuuint64_t>(bytes * strides.token), static_cast<cuuint64_t>(width),
                               static_cast<cuuint64_t>(bytes * strides.head),
                               static_cast<cuuint64_t>(bytes * strides.page)};
  const cuuint32_t sizes[5] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(box),
                               static_cast<cuuint32_t>(head_dim / columns), 1, 1};
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  // Promotion fetches what the box does not need: 5% of the bandwidth. Data is only moved: types of its size do.
  return encode(&map, bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 5,
                const_cast<void*>(data), dims, steps, sizes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                width == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

void describe_segments(DecodeParams& params, const HeadDims& dims) {
  const AttentionParams& attention = params.attention;
  for (int32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentParams& segment = attention.segments[i];
    params.box[i] = kSingles;
    params.direct[i] = false;
    if (segment.dtype == DType::kUnset || size_of(segment.dtype) != dims.bytes) continue;
    params.direct[i] =
        is_aligned(segment.k, segment.k_strides, dims.bytes) && is_aligned(segment.v, segment.v_strides, dims.bytes);
    if (!segment.paged || segment.page_size % kSmallBox != 0) continue;
    const int32_t box = segment.page_size % kLargeBox == 0 ? kLargeBox : kSmallBox;
    const int32_t heads = attention.num_kv_heads;
    if (make_map(params.maps[i].k, segment, segment.k, segment.k_strides, dims.qk, dims.bytes, heads, box) &&
        make_map(params.maps[i].v, segment, segment.v, segment.v_strides, dims.v, dims.bytes, heads, box)) {
      params.box[i] = box;
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90
