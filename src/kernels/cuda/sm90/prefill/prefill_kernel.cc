#include "kernels/cuda/sm90/prefill/prefill_kernel.hpp"

#include "core/error.hpp"
#include "kernels/cuda/common/merge.hpp"
#include "kernels/cuda/sm90/prefill/launch.hpp"
#include "kernels/cuda/sm90/prefill/shape.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {
namespace {

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

/// The kernels of one pair of head dimensions.
struct DimsLaunch {
  int32_t qk;
  int32_t v;
  LaunchClass bfloat16;
  LaunchClass float16;
};
constexpr DimsLaunch kDimsLaunches[] = {{64, 64, launch_bfloat16_64_64, launch_float16_64_64},
                                        {96, 96, launch_bfloat16_96_96, launch_float16_96_96},
                                        {128, 128, launch_bfloat16_128_128, launch_float16_128_128},
                                        {192, 128, launch_bfloat16_192_128, launch_float16_192_128},
                                        {256, 256, launch_bfloat16_256_256, launch_float16_256_256}};

const DimsLaunch* find_dims(int32_t qk, int32_t v) {
  for (const DimsLaunch& dims : kDimsLaunches) {
    if (dims.qk == qk && dims.v == v) return &dims;
  }
  return nullptr;
}

std::string refusal(const AttentionConfig& config) {
  if (find_dims(config.head_dim_qk, config.head_dim_v) == nullptr) {
    return core::message("head_dim_qk is ", config.head_dim_qk, ", head_dim_v ", config.head_dim_v,
                         "; cuda-sm90-prefill takes 64/64, 96/96, 128/128, 192/128 and 256/256");
  }
  if (!is_16_bit(config.q) || config.kv != config.q || config.ragged_kv != config.q) {
    return core::message("q is ", config.q, ", kv ", config.kv, ", ragged_kv ", config.ragged_kv,
                         "; cuda-sm90-prefill takes one of float16 and bfloat16");
  }
  if (!is_16_bit(config.out) && !is_fp8(config.out) && config.out != DType::kFloat32) {
    return core::message("out is ", config.out, "; cuda-sm90-prefill writes float16, bfloat16, float32 and fp8");
  }
  if (config.kv_format != KvFormat::kStrided) return "kv_format is kCpuPacked; kernels on a GPU take kStrided";
  if (config.features.has(Feature::kRopeLlama)) {
    return "Feature::kRopeLlama is asked for; cuda-sm90-prefill applies no rotary embedding: rotate q and K before the "
           "call";
  }
  return {};
}

planner::TileShape tile(const AttentionConfig& config) {
  return {.rows = kRows,
          .kv_tokens = tile_tokens({config.head_dim_qk, config.head_dim_v}),
          .schedule = planner::Schedule::kClaimed,
          .order = planner::ClaimOrder::kDearestFirst};
}

DType weights(const AttentionConfig& config) {
  return config.q;
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  const DimsLaunch& dims = *find_dims(params.head_dim_qk, params.head_dim_v);
  const bool cap = params.soft_cap != 0.0f;
  const bool alibi = params.alibi_slopes != nullptr;
  const Variant variant = params.mask == MaskKind::kCustom || (cap && alibi) ? Variant::kAny
                          : cap                                              ? Variant::kCap
                          : alibi                                            ? Variant::kAlibi
                                                                             : Variant::kPlain;
  const LaunchClass launch_class = shape.q == DType::kFloat16 ? dims.float16 : dims.bfloat16;
  launch_class(params, variant, shape.num_workers, stream);
  if (shape.merge) launch_merge(params, shape.num_workers, stream, true, 16);
}

}  // namespace

const AttentionKernel kSm90PrefillKernel{.name = "cuda-sm90-prefill",
                                         .min_compute_capability = 90,
                                         .max_compute_capability = 90,
                                         .refusal = refusal,
                                         .tile = tile,
                                         .weights = weights,
                                         .workers_per_sm = 1,
                                         .tile_cost = 128,
                                         .row_cost = 0,
                                         .start_cost = 160,
                                         .least_claim_tokens = 1024,
                                         .section_bytes = int64_t{40} << 20,
                                         .launch = launch};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
