#include <algorithm>

#include "kernels/cuda/sm90/decode/tensor_map_encoder.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {
namespace {

/// Dimensions, innermost first: 64 components, tokens of a page, further 64 components, heads, pages. A box is all
/// components of one head of `box` tokens.
bool make_map(CUtensorMap& map, const SegmentParams& segment, const void* data, const KvStrides& strides,
              int32_t head_dim, int32_t num_heads, int32_t box) {
  constexpr int32_t kColumns = kSwizzledRow / 2;
  constexpr int64_t kLargestStride = (int64_t{1} << 40) / 2;
  const TensorMapEncoder encode = tensor_map_encoder();
  if (encode == nullptr || reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(2 * elements); };
  for (const int64_t stride : {strides.token, strides.head, strides.page}) {
    if (stride % 8 != 0 || stride < 0 || stride >= kLargestStride) return false;
  }
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(kColumns), static_cast<cuuint64_t>(segment.page_size),
                              static_cast<cuuint64_t>(head_dim / kColumns), static_cast<cuuint64_t>(num_heads),
                              static_cast<cuuint64_t>(std::max<int64_t>(segment.num_pages, 1))};
  const cuuint64_t steps[4] = {bytes(strides.token), kSwizzledRow, bytes(strides.head), bytes(strides.page)};
  const cuuint32_t sizes[5] = {static_cast<cuuint32_t>(kColumns), static_cast<cuuint32_t>(box),
                               static_cast<cuuint32_t>(head_dim / kColumns), 1, 1};
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  // Promotion fetches what the box does not need: 5% of the bandwidth. The data is only moved: any 16-bit type does.
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(data), dims, steps, sizes, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

void describe_segments(DecodeParams& params, const HeadDims& dims) {
  const AttentionParams& attention = params.attention;
  for (int32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentParams& segment = attention.segments[i];
    params.box[i] = kSingles;
    if (segment.dtype == DType::kUnset || !segment.paged || segment.page_size % kSmallBox != 0) continue;
    if (attention.head_dim_qk != dims.qk || attention.head_dim_v != dims.v) continue;
    const int32_t box = segment.page_size % kLargeBox == 0 ? kLargeBox : kSmallBox;
    if (make_map(params.maps[i].k, segment, segment.k, segment.k_strides, dims.qk, attention.num_kv_heads, box) &&
        make_map(params.maps[i].v, segment, segment.v, segment.v_strides, dims.v, attention.num_kv_heads, box)) {
      params.box[i] = box;
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90
