#include "kernels/cuda/sm90/decode/decode_kernel.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "kernels/cuda/common/merge.hpp"
#include "kernels/cuda/sm90/decode/launch.hpp"
#include "kernels/cuda/sm90/decode/shape.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {
namespace {

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

/// The kernels of one pair of head dimensions. Without one of codes, these are widened on the way into shared memory.
struct DimsLaunch {
  int32_t qk;
  int32_t v;
  LaunchClass bfloat16;
  LaunchClass float16;
  LaunchClass e4m3;
  LaunchClass e5m2;
};
constexpr DimsLaunch kDimsLaunches[] = {
    {64, 64, launch_bfloat16_64_64, launch_float16_64_64, launch_e4m3_64_64, launch_e5m2_64_64},
    {96, 96, launch_bfloat16_96_96, launch_float16_96_96, nullptr, nullptr},
    {128, 128, launch_bfloat16_128_128, launch_float16_128_128, launch_e4m3_128_128, launch_e5m2_128_128},
    {192, 128, launch_bfloat16_192_128, launch_float16_192_128, nullptr, nullptr},
    {256, 256, launch_bfloat16_256_256, launch_float16_256_256, launch_e4m3_256_256, launch_e5m2_256_256}};

const DimsLaunch* find_dims(int32_t qk, int32_t v) {
  for (const DimsLaunch& dims : kDimsLaunches) {
    if (dims.qk == qk && dims.v == v) return &dims;
  }
  return nullptr;
}

/// The 16-bit type that everything is widened to: the one among the inputs', bfloat16 where all are fp8; kUnset where
/// inputs are of two 16-bit types, or of others.
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
  if (find_dims(config.head_dim_qk, config.head_dim_v) == nullptr) {
    return core::message("head_dim_qk is ", config.head_dim_qk, ", head_dim_v ", config.head_dim_v,
                         "; cuda-sm90-decode takes 64/64, 96/96, 128/128, 192/128 and 256/256");
  }
  if (compute_type(config.q, config.kv, config.ragged_kv) == DType::kUnset) {
    return core::message("q is ", config.q, ", kv ", config.kv, ", ragged_kv ", config.ragged_kv,
                         "; cuda-sm90-decode takes fp8 and one of float16 and bfloat16");
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

scheduler::TileShape tile(const AttentionConfig& config) {
  const HeadDims dims{config.head_dim_qk, config.head_dim_v};
  return {.rows = rows_of_item(config.num_q_heads / config.num_kv_heads),
          .kv_tokens = plan_tokens(dims),
          .schedule = scheduler::Schedule::kDynamic};
}

DType p_dtype(const AttentionConfig& config) {
  return compute_type(config.q, config.kv, config.ragged_kv);
}

/// The type of codes that all keys and values are; kUnset where they differ. Above kRunToRun a request's bits must not
/// depend on which segments other requests of the batch have, so that kernels are chosen by the configuration alone.
DType common_codes(const AttentionParams& params) {
  if (params.determinism > Determinism::kRunToRun) return DType::kUnset;
  DType common = DType::kUnset;
  for (const SegmentParams& segment : params.segments) {
    if (segment.dtype == DType::kUnset) continue;
    if (!is_fp8(segment.dtype) || (common != DType::kUnset && common != segment.dtype)) return DType::kUnset;
    common = segment.dtype;
  }
  return common;
}

LaunchClass choose(const AttentionParams& params, const LaunchShape& shape) {
  const DimsLaunch& dims = *find_dims(params.head_dim_qk, params.head_dim_v);
  const DType codes = common_codes(params);
  if (codes == DType::kFloat8E4M3 && dims.e4m3 != nullptr) return dims.e4m3;
  if (codes == DType::kFloat8E5M2 && dims.e5m2 != nullptr) return dims.e5m2;
  return compute_type(shape.q, shape.kv, shape.ragged_kv) == DType::kFloat16 ? dims.float16 : dims.bfloat16;
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  choose(params, shape)(params, shape, stream);
  // As many CTAs as wait beside this kernel's, and more where a merge has more rows than a block has warps.
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t rows = shape.max_rows <= kFewRows ? group_size : shape.max_rows;
  if (shape.combine) launch_merge(params, shape.num_workers, stream, true, std::clamp((rows + 3) / 4, 1, 4));
}

}  // namespace

const AttentionKernel kSm90DecodeKernel{.name = "cuda-sm90-decode",
                                        .min_compute_capability = 90,
                                        .max_compute_capability = 90,
                                        .refusal = refusal,
                                        .tile = tile,
                                        .p_dtype = p_dtype,
                                        .workers_per_sm = 1,
                                        .tile_cost = 96,
                                        .row_cost = 1,
                                        .start_cost = 48,
                                        .double_rows = kMaxRows,
                                        .launch = launch};

}  // namespace folio::inline v0::kernels::cuda::sm90
