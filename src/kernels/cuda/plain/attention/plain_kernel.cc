#include "kernels/cuda/plain/attention/plain_kernel.hpp"

#include "core/error.hpp"
#include "kernels/cuda/plain/attention/launch.hpp"

namespace folio::inline v0::kernels::cuda::plain {
namespace {

constexpr int32_t kLargestHeadDim = 256;

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

std::string refusal(const AttentionConfig& config) {
  const auto refuse_dim = [](const char* name, int32_t dim) -> std::string {
    if (dim >= 8 && dim <= kLargestHeadDim && dim % 8 == 0) return {};
    return core::message(name, " is ", dim, "; cuda-plain takes multiples of 8 up to ", kLargestHeadDim);
  };
  std::string why = refuse_dim("head_dim_qk", config.head_dim_qk);
  if (why.empty()) why = refuse_dim("head_dim_v", config.head_dim_v);
  if (!why.empty()) return why;
  if (!is_16_bit(config.q) || config.kv != config.q || config.ragged_kv != config.q) {
    return core::message("q is ", config.q, ", kv ", config.kv, ", ragged_kv ", config.ragged_kv,
                         "; cuda-plain takes float16 or bfloat16, the same for all three");
  }
  if (!is_16_bit(config.out) && config.out != DType::kFloat32) {
    return core::message("out is ", config.out, "; cuda-plain writes float16, bfloat16 and float32");
  }
  if (config.kv_format != KvFormat::kStrided) return "kv_format is kCpuPacked; kernels on a GPU take kStrided";
  if (config.mask == MaskKind::kCustom) return "mask is kCustom; cuda-plain takes kNone and kCausal, with windows";
  if (config.features.has(Feature::kRopeLlama)) {
    return "Feature::kRopeLlama is asked for; cuda-plain applies no rotary embedding: rotate q and K before the call";
  }
  return {};
}

planner::TileShape tile(const AttentionConfig&) {
  return {.rows = 16, .kv_tokens = 32};
}

DType weights(const AttentionConfig&) {
  return DType::kFloat32;
}

}  // namespace

const AttentionKernel kPlainKernel{.name = "cuda-plain",
                                   .min_compute_capability = 80,
                                   .refusal = refusal,
                                   .tile = tile,
                                   .weights = weights,
                                   .workers_per_sm = 2,
                                   .tile_cost = 16,
                                   .row_cost = 1,
                                   .launch = launch};

}  // namespace folio::inline v0::kernels::cuda::plain
