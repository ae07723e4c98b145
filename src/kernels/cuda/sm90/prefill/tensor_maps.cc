#include <algorithm>

#include "folio/types/dtype.hpp"
#include "kernels/cuda/sm90/common/tensor_map.hpp"
#include "kernels/cuda/sm90/prefill/params.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {
namespace {

/// Whether every head of every token begins at a multiple of 16 bytes.
bool is_aligned(const void* data, const KvStrides& strides, int32_t bytes) {
  const int64_t all = strides.page | strides.token | strides.head;
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && all * bytes % 16 == 0;
}

/// Pages as steps of eight tokens from one to the next; 0 where they are no whole number of such steps.
int32_t eights_of(const KvStrides& strides) {
  const int64_t step = kEight * strides.token;
  if (step <= 0 || strides.page <= 0 || strides.page % step != 0 || strides.page / step > INT32_MAX) return 0;
  return static_cast<int32_t>(strides.page / step);
}

/// Dimensions, innermost first: a span's components, eight tokens, their next spans, heads, eights of tokens, pages
/// lying a whole number of them apart. A box is all components of one head of some tokens: see tile_offset,
/// code_offset.
bool make_map(CUtensorMap& map, const SegmentParams& segment, const void* data, const KvStrides& strides,
              int32_t head_dim, int32_t num_heads, int32_t box, int32_t bytes) {
  const TensorMapEncoder encode = tensor_map_encoder();
  if (encode == nullptr || strides.head < 0) return false;
  const int64_t last_page = std::max<int64_t>(segment.num_pages, 1) - 1;
  const int64_t eights = last_page * eights_of(strides) + segment.page_size / kEight;
  if (eights > INT32_MAX) return false;
  for (const int64_t stride : {kEight * strides.token, strides.head}) {
    if (stride >= (int64_t{1} << 40) / bytes) return false;
  }
  const int32_t width = bytes == 1 ? kCodeSpan : span(head_dim);
  const auto components = static_cast<cuuint32_t>(width / bytes);
  const cuuint32_t spans = static_cast<cuuint32_t>(head_dim) / components;
  const cuuint64_t dims[5] = {components, kEight, spans, static_cast<cuuint64_t>(num_heads),
                              static_cast<cuuint64_t>(eights)};
  const cuuint64_t steps[4] = {static_cast<cuuint64_t>(bytes * strides.token), static_cast<cuuint64_t>(width),
                               static_cast<cuuint64_t>(bytes * strides.head),
                               static_cast<cuuint64_t>(bytes * kEight * strides.token)};
  const cuuint32_t sizes[5] = {components, kEight, spans, 1, static_cast<cuuint32_t>(box / kEight)};
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  // Data is only moved: any type of its size does.
  const auto type = bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  return encode(&map, type, 5, const_cast<void*>(data), dims, steps, sizes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                width == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// Of queries, or of results. Dimensions, innermost first: a span's components, heads, tokens, the next spans. Only
/// items whose rows are all there are copied so: the number of tokens does not matter.
bool make_row_map(CUtensorMap& map, const AttentionParams& params, const void* data, DType dtype, int64_t token_stride,
                  int64_t head_stride, int32_t head_dim) {
  constexpr int32_t kBytes = 2;
  const TensorMapEncoder encode = tensor_map_encoder();
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  if (encode == nullptr || kGroupRows % group_size != 0 || size_of(dtype) != kBytes) return false;
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  for (const int64_t stride : {head_stride, token_stride}) {
    if (stride <= 0 || stride * kBytes % 16 != 0 || stride >= (int64_t{1} << 40) / kBytes) return false;
  }
  const auto width = static_cast<cuuint32_t>(span(head_dim));
  const cuuint32_t components = width / kBytes;
  const cuuint32_t spans = static_cast<cuuint32_t>(head_dim) / components;
  const cuuint64_t dims[5] = {components, static_cast<cuuint64_t>(params.num_q_heads), INT32_MAX, spans, 1};
  const cuuint64_t steps[4] = {static_cast<cuuint64_t>(kBytes * head_stride),
                               static_cast<cuuint64_t>(kBytes * token_stride), width, width};
  const cuuint32_t sizes[5] = {components, static_cast<cuuint32_t>(group_size),
                               static_cast<cuuint32_t>(kGroupRows / group_size), spans, 1};
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(data), dims, steps, sizes, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, width == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

void describe(PrefillParams& params, const HeadDims& dims, int32_t kv_bytes) {
  const AttentionParams& attention = params.attention;
  for (int32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentParams& segment = attention.segments[i];
    SegmentCopy& copy = params.copies[i];
    copy = {};
    copy.page_size = FastDiv(std::max(segment.page_size, 1));
    if (segment.dtype == DType::kUnset || size_of(segment.dtype) != kv_bytes) continue;
    copy.direct =
        is_aligned(segment.k, segment.k_strides, kv_bytes) && is_aligned(segment.v, segment.v_strides, kv_bytes);
    const int32_t tokens = kv_bytes == 1 ? kLargestCodeBox : tile_tokens(dims);
    const int32_t box = segment.paged && copy.direct ? box_tokens(segment.page_size, tokens) : 0;
    copy.eights = eights_of(segment.k_strides);
    if (box == 0 || copy.eights == 0 || copy.eights != eights_of(segment.v_strides)) continue;
    const int32_t heads = attention.num_kv_heads;
    if (make_map(params.maps[i].k, segment, segment.k, segment.k_strides, dims.qk, heads, box, kv_bytes) &&
        make_map(params.maps[i].v, segment, segment.v, segment.v_strides, dims.v, heads, box, kv_bytes)) {
      copy.box = box;
    }
  }
  params.group = FastDiv(attention.num_q_heads / attention.num_kv_heads);
  params.queries_by_boxes = kv_bytes == 2 && make_row_map(params.queries, attention, attention.q, attention.q_dtype,
                                                          attention.q_token_stride, attention.q_head_stride, dims.qk);
  params.results_by_boxes =
      query_places(dims) == kItems && make_row_map(params.results, attention, attention.out, attention.out_dtype,
                                                   attention.out_token_stride, attention.out_head_stride, dims.v);
  params.out_wide = reinterpret_cast<uintptr_t>(attention.out) % 16 == 0 &&
                    (attention.out_token_stride | attention.out_head_stride) % kPiece == 0;
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
