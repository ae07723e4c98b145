#include "kernels/cuda/sm90/common/tensor_map.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {

bool encode_tensor_map(CUtensorMap& map, const TensorMapShape& shape) {
  constexpr int64_t kStrideLimit = int64_t{1} << 40;  // of cuTensorMapEncodeTiled
  const TensorMapEncoder encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  cuuint64_t dims[5];
  cuuint64_t strides[4];
  cuuint32_t box[5];
  for (int32_t i = 0; i < 5; ++i) {
    dims[i] = static_cast<cuuint64_t>(shape.dims[i]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
    if (i == 4) break;
    if (shape.strides[i] < 0 || shape.strides[i] >= kStrideLimit) return false;
    strides[i] = static_cast<cuuint64_t>(shape.strides[i]);
  }
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const auto type = shape.element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const auto swizzle = shape.swizzle_bytes == 0     ? CU_TENSOR_MAP_SWIZZLE_NONE
                       : shape.swizzle_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                    : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode(&map, type, 5, const_cast<void*>(shape.data), dims, strides, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, shape.l2_promotion,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool is_aligned_16B(const void* data, const KvStrides& strides, int32_t element_bytes) {
  const int64_t all = strides.page | strides.token | strides.head;
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && all * element_bytes % 16 == 0;
}

}  // namespace folio::inline v0::kernels::cuda::sm90
