#include "kernels/cuda/sm90/decode/decode_kernel.hpp"

#include "core/error.hpp"
#include "kernels/cuda/common/merge.hpp"
#include "kernels/cuda/sm90/decode/launch.hpp"
#include "kernels/cuda/sm90/decode/shape.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {
namespace {

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

std::string refusal(const AttentionConfig& config) {
  if (config.head_dim_qk != config.head_dim_v || (config.head_dim_v != 64 && config.head_dim_v != 128)) {
    return core::message("head_dim_qk is ", config.head_dim_qk, ", head_dim_v ", config.head_dim_v,
                         "; cuda-sm90-decode takes 64 and 128, the same for both");
  }
  if (!is_16_bit(config.q) || config.kv != config.q || config.ragged_kv != config.q) {
    return core::message("q is ", config.q, ", kv ", config.kv, ", ragged_kv ", config.ragged_kv,
                         "; cuda-sm90-decode takes float16 or bfloat16, the same for all three");
  }
  if (!is_16_bit(config.out) && !is_fp8(config.out) && config.out != DType::kFloat32) {
    return core::message("out is ", config.out, "; cuda-sm90-decode writes float16, bfloat16, float32 and fp8");
  }
  if (config.kv_format != KvFormat::kStrided) return "kv_format is kCpuPacked; kernels on a GPU take kStrided";
  if (config.features.has(Feature::kRopeLlama)) {
    return "Feature::kRopeLlama is asked for; cuda-sm90-decode applies no rotary embedding: rotate q and K before the "
           "call";
  }
  return {};
}

planner::TileShape tile(const AttentionConfig&) {
  return {.rows = kMaxRows, .kv_tokens = kTokens, .schedule = planner::Schedule::kClaimed};
}

DType weights(const AttentionConfig& config) {
  return config.q;
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  const bool small = params.head_dim_v == 64;
  const LaunchClass launch_class = shape.q == DType::kFloat16 ? (small ? launch_float16_64 : launch_float16_128)
                                                              : (small ? launch_bfloat16_64 : launch_bfloat16_128);
  launch_class(params, shape.num_workers, stream);
  if (shape.merge) launch_merge(params, shape.num_workers, stream);
}

}  // namespace

const AttentionKernel kSm90DecodeKernel{.name = "cuda-sm90-decode",
                                        .min_compute_capability = 90,
                                        .max_compute_capability = 90,
                                        .refusal = refusal,
                                        .tile = tile,
                                        .weights = weights,
                                        .workers_per_sm = 1,
                                        .tile_cost = 96,
                                        .row_cost = 1,
                                        .item_cost = 48,
                                        .launch = launch};

}  // namespace folio::inline v0::kernels::cuda::sm90
