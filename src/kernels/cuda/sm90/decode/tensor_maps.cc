#include <algorithm>

#include "kernels/cuda/sm90/common/tensor_map.hpp"
#include "kernels/cuda/sm90/decode/params.hpp"

namespace folio::inline v0::kernels::cuda::sm90::decode {
namespace {

/// Dimensions, innermost first: a swizzle row's components, tokens of a page, a token's swizzle rows, heads, pages. A
/// box is all components of one head of `box` tokens.
bool make_map(CUtensorMap& map, const SegmentParams& segment, const void* data, const KvStrides& strides,
              int32_t head_dim, int32_t bytes, int32_t num_heads, int32_t box) {
  const int32_t width = side_by_side(head_dim, bytes);
  const int32_t columns = width / bytes;
  return is_aligned_16B(data, strides, bytes) &&
         encode_tensor_map(map, {.data = data,
                                 .element_bytes = bytes,
                                 .dims = {columns, segment.page_size, head_dim / columns, num_heads,
                                          std::max<int64_t>(segment.num_pages, 1)},
                                 .strides = {bytes * strides.token, width, bytes * strides.head, bytes * strides.page},
                                 .box = {columns, box, head_dim / columns, 1, 1},
                                 .swizzle_bytes = width,
                                 // Promotion fetches more than the box: 5 % of the bandwidth.
                                 .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_NONE});
}

}  // namespace

void describe_segments(DecodeParams& params, const HeadDims& dims) {
  const AttentionParams& attention = params.attention;
  for (int32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentParams& segment = attention.segments[i];
    params.box[i] = kSingles;
    params.direct[i] = false;
    if (segment.dtype == DType::kUnset || size_of(segment.dtype) != dims.bytes) continue;
    params.direct[i] = is_aligned_16B(segment.k, segment.k_strides, dims.bytes) &&
                       is_aligned_16B(segment.v, segment.v_strides, dims.bytes);
    if (!segment.paged || segment.page_size % kSmallBox != 0) continue;
    const int32_t box = segment.page_size % kLargeBox == 0 ? kLargeBox : kSmallBox;
    const int32_t heads = attention.num_kv_heads;
    if (make_map(params.maps[i].k, segment, segment.k, segment.k_strides, dims.qk, dims.bytes, heads, box) &&
        make_map(params.maps[i].v, segment, segment.v, segment.v_strides, dims.v, dims.bytes, heads, box)) {
      params.box[i] = box;
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
