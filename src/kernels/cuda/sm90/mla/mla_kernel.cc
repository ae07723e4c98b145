#include "kernels/cuda/sm90/mla/mla_kernel.hpp"

#include "core/error.hpp"
#include "kernels/cuda/common/merge.hpp"
#include "kernels/cuda/sm90/mla/launch.hpp"
#include "kernels/cuda/sm90/mla/shape.hpp"

namespace folio::inline v0::kernels::cuda::sm90::mla {
namespace {

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

std::string refusal(const AttentionConfig& config) {
  if (config.head_dim_qk != kDimQk || config.head_dim_v != kDimV) {
    return core::message("head_dim_qk is ", config.head_dim_qk, ", head_dim_v ", config.head_dim_v,
                         "; cuda-sm90-mla takes ", kDimQk, "/", kDimV);
  }
  if (!is_16_bit(config.q) || config.kv != config.q || config.ragged_kv != config.q) {
    return core::message("q is ", config.q, ", kv ", config.kv, ", ragged_kv ", config.ragged_kv,
                         "; cuda-sm90-mla takes one of float16 and bfloat16");
  }
  if (!is_16_bit(config.out) && !is_fp8(config.out) && config.out != DType::kFloat32) {
    return core::message("out is ", config.out, "; cuda-sm90-mla writes float16, bfloat16, float32 and fp8");
  }
  if (config.kv_format != KvFormat::kStrided) return "kv_format is kCpuPacked; kernels on a GPU take kStrided";
  if (config.features.has(Feature::kRopeLlama)) {
    return "Feature::kRopeLlama is asked for; cuda-sm90-mla applies no rotary embedding: rotate q and K before the "
           "call";
  }
  return {};
}

scheduler::TileShape tile(const AttentionConfig&) {
  return {.rows = kRows,
          .kv_tokens = kTokens,
          .schedule = scheduler::Schedule::kDynamic,
          .order = scheduler::TileOrder::kLpt};
}

DType p_dtype(const AttentionConfig& config) {
  return config.q;
}

/// Where it was measured to be faster than cuda-sm80.
bool preferred(const AttentionConfig& config) {
  const bool branches = config.features.has(Feature::kSoftCap) || config.features.has(Feature::kAlibi) ||
                        config.mask == MaskKind::kCustom;
  return !branches && config.page_size % kEight == 0;
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  const bool general = params.soft_cap != 0.0f || params.alibi_slopes != nullptr || params.mask == MaskKind::kCustom;
  const LaunchClass launch_class = shape.q == DType::kFloat16 ? launch_float16 : launch_bfloat16;
  launch_class(params, general, shape.num_workers, stream);
  if (shape.combine) launch_merge(params, shape.num_workers, stream, true);
}

}  // namespace

const AttentionKernel kSm90MlaKernel{.name = "cuda-sm90-mla",
                                     .min_compute_capability = 90,
                                     .max_compute_capability = 90,
                                     .refusal = refusal,
                                     .tile = tile,
                                     .p_dtype = p_dtype,
                                     .preferred = preferred,
                                     .workers_per_sm = 1,
                                     .tile_cost = 128,
                                     .row_cost = 0,
                                     .start_cost = 256,
                                     .min_split_tokens = 1024,
                                     .launch = launch};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
