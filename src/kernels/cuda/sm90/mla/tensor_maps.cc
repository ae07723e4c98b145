#include <algorithm>

#include "folio/types/dtype.hpp"
#include "kernels/cuda/sm90/common/tensor_map.hpp"
#include "kernels/cuda/sm90/mla/params.hpp"

namespace folio::inline v0::kernels::cuda::sm90::mla {
namespace {

constexpr int64_t kElement = 2;  ///< bytes of an element

/// Whether every head of every token begins at a multiple of 16 bytes.
bool is_aligned(const void* data, const KvStrides& strides) {
  const int64_t all = strides.page | strides.token | strides.head;
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && all * kElement % 16 == 0;
}

/// Whether values are their keys' first components.
bool is_inside(const SegmentParams& segment, int32_t num_heads) {
  return segment.k == segment.v && segment.k_strides.page == segment.v_strides.page &&
         segment.k_strides.token == segment.v_strides.token &&
         (num_heads == 1 || segment.k_strides.head == segment.v_strides.head);
}

/// Dimensions, innermost first: 64 components, tokens of a page, the components' columns, heads, pages. A box is one
/// column of some tokens: see tile_offset.
bool make_map(CUtensorMap& map, const SegmentParams& segment, const void* data, const KvStrides& strides,
              int32_t head_dim, int32_t num_heads, int32_t box) {
  const TensorMapEncoder encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  for (const int64_t stride : {strides.token, strides.head, strides.page}) {
    if (stride < 0 || stride >= (int64_t{1} << 40) / kElement) return false;
  }
  const cuuint64_t dims[5] = {64, static_cast<cuuint64_t>(segment.page_size), static_cast<cuuint64_t>(head_dim / 64),
                              static_cast<cuuint64_t>(num_heads),
                              static_cast<cuuint64_t>(std::max<int64_t>(segment.num_pages, 1))};
  const cuuint64_t steps[4] = {static_cast<cuuint64_t>(kElement * strides.token), 128,
                               static_cast<cuuint64_t>(kElement * strides.head),
                               static_cast<cuuint64_t>(kElement * strides.page)};
  const cuuint32_t sizes[5] = {64, static_cast<cuuint32_t>(box), 1, 1, 1};
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  // Data is only moved: any type of its size does.
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(data), dims, steps, sizes, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

void describe(MlaParams& params) {
  const AttentionParams& attention = params.attention;
  const int32_t heads = attention.num_kv_heads;
  for (int32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentParams& segment = attention.segments[i];
    SegmentCopy& copy = params.copies[i];
    copy = {};
    if (segment.dtype == DType::kUnset) continue;
    copy.inside = is_inside(segment, heads);
    copy.direct = is_aligned(segment.k, segment.k_strides) && is_aligned(segment.v, segment.v_strides);
    copy.page_size = FastDiv(std::max(segment.page_size, 1));
    const int32_t box = segment.paged && copy.direct ? box_tokens(segment.page_size) : 0;
    if (box == 0) continue;
    if (make_map(params.maps[i].k, segment, segment.k, segment.k_strides, kDimQk, heads, box) &&
        (copy.inside || make_map(params.maps[i].v, segment, segment.v, segment.v_strides, kDimV, heads, box))) {
      copy.box = box;
      while (box << copy.log_boxes < kTokens) ++copy.log_boxes;
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
