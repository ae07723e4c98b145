#include "kernels/cuda/sm80/attention/takes.hpp"

#include "core/error.hpp"
#include "kernels/cuda/sm80/attention/shape.hpp"

namespace folio::inline v0::kernels::cuda::sm80 {
namespace {

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

}  // namespace

DType compute_type(DType q, DType kv, DType ragged_kv) {
  DType type = DType::kUnset;
  for (const DType input : {q, kv, ragged_kv}) {
    if (is_fp8(input)) continue;
    if (!is_16_bit(input) || (type != DType::kUnset && type != input)) return DType::kUnset;
    type = input;
  }
  return type == DType::kUnset ? DType::kBFloat16 : type;
}

std::string refusal(const AttentionConfig& config) {
  for (const auto& [name, dim] : {std::pair{"head_dim_qk", config.head_dim_qk}, {"head_dim_v", config.head_dim_v}}) {
    if (dim >= 8 && dim % 8 == 0 && dim <= 256) continue;
    return core::message(name, " is ", dim, "; cuda-sm80 takes multiples of 8 up to 256, cuda-plain up to 576/512");
  }
  if (compute_type(config.q, config.kv, config.ragged_kv) == DType::kUnset) {
    return core::message("q is ", config.q, ", kv ", config.kv, ", ragged_kv ", config.ragged_kv,
                         "; cuda-sm80 takes fp8 and one of float16 and bfloat16; cuda-plain takes the others");
  }
  if (!is_16_bit(config.out) && !is_fp8(config.out) && config.out != DType::kFloat32) {
    return core::message("out is ", config.out,
                         "; cuda-sm80 writes float16, bfloat16, float32 and fp8; cuda-plain NVFP4 too");
  }
  if (config.kv_format != KvFormat::kStrided) return "kv_format is kCpuPacked; kernels on a GPU take kStrided";
  if (config.features.has(Feature::kRopeLlama)) {
    return "Feature::kRopeLlama is asked for; cuda-sm80 applies no rotary embedding: rotate q and K before the call, "
           "or "
           "take cuda-plain";
  }
  return {};
}

planner::TileShape tile(const AttentionConfig& config) {
  return {.rows = rows_per_item(kDimClasses[dim_class(config.head_dim_qk, config.head_dim_v)]), .kv_tokens = kTokens};
}

DType weights(const AttentionConfig& config) {
  return compute_type(config.q, config.kv, config.ragged_kv);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
