#include "core/error.hpp"
#include "folio/types/nvfp4.hpp"
#include "kernels/cuda/common/compute_type.hpp"
#include "kernels/cuda/sm80/config.hpp"
#include "kernels/cuda/sm80/sm80_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm80 {

std::string refusal(const AttentionConfig& config) {
  const auto refuse_dim = [](const char* name, int32_t dim, int32_t most) -> std::string {
    if (dim >= 8 && dim % 8 == 0 && dim <= most) return {};
    return core::message(name, " is ", dim, "; cuda-sm80 takes multiples of 8 up to ", most);
  };
  std::string why = refuse_dim("head_dim_qk", config.head_dim_qk, kLargeHeadDims.qk);
  if (why.empty()) why = refuse_dim("head_dim_v", config.head_dim_v, kLargeHeadDims.v);
  if (!why.empty()) return why;
  if (compute_type(config.q, config.kv, config.ragged_kv) == DType::kUnset) {
    return core::message("q is ", config.q, ", kv ", config.kv, ", ragged_kv ", config.ragged_kv,
                         "; cuda-sm80 takes fp8 and one of float16 and bfloat16; cuda-plain takes the others");
  }
  const bool nvfp4 = config.out == DType::kFloat4E2M1x2;
  if (!is_16_bit(config.out) && !is_fp8(config.out) && config.out != DType::kFloat32 && !nvfp4) {
    return core::message("out is ", config.out, "; cuda-sm80 writes float16, bfloat16, float32, fp8 and NVFP4");
  }
  if (nvfp4 && config.head_dim_v % kNvfp4BlockSize != 0) {
    return core::message("head_dim_v is ", config.head_dim_v, " with an NVFP4 output, which takes multiples of ",
                         kNvfp4BlockSize);
  }
  why = refuse_unless_strided(config.kv_format);
  if (!why.empty()) return why;
  if (config.features.has(Feature::kRopeLlama)) {
    return "Feature::kRopeLlama is asked for; cuda-sm80 applies no rotary embedding: rotate q and K before the call, "
           "or "
           "take cuda-plain";
  }
  return {};
}

scheduler::TileShape tile(const AttentionConfig& config) {
  return {.rows = tile_rows(head_dims_index(config.head_dim_qk, config.head_dim_v)), .kv_tokens = kKvTile};
}

DType p_dtype(const AttentionConfig& config) {
  return compute_type(config.q, config.kv, config.ragged_kv);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
