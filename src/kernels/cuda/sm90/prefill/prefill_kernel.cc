#include "kernels/cuda/sm90/prefill/prefill_kernel.hpp"

#include "core/error.hpp"
#include "kernels/cuda/common/merge.hpp"
#include "kernels/cuda/sm90/prefill/launch.hpp"
#include "kernels/cuda/sm90/prefill/native_shape.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {
namespace {

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

/// The kernels of one pair of head dimensions. Without one of codes, these are widened by a slow loop.
struct DimsLaunch {
  int32_t qk;
  int32_t v;
  LaunchClass bfloat16;
  LaunchClass float16;
  LaunchClass e4m3;
  LaunchClass e5m2;
};
constexpr DimsLaunch kDimsLaunches[] = {
    {64, 64, launch_bfloat16_64_64, launch_float16_64_64, nullptr, nullptr},
    {96, 96, launch_bfloat16_96_96, launch_float16_96_96, nullptr, nullptr},
    {128, 128, launch_bfloat16_128_128, launch_float16_128_128, launch_e4m3_128_128, launch_e5m2_128_128},
    {192, 128, launch_bfloat16_192_128, launch_float16_192_128, nullptr, nullptr},
    {256, 256, launch_bfloat16_256_256, launch_float16_256_256, nullptr, nullptr}};

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
                         "; cuda-sm90-prefill takes 64/64, 96/96, 128/128, 192/128 and 256/256");
  }
  if (compute_type(config.q, config.kv, config.ragged_kv) == DType::kUnset) {
    return core::message("q is ", config.q, ", kv ", config.kv, ", ragged_kv ", config.ragged_kv,
                         "; cuda-sm90-prefill takes fp8 and one of float16 and bfloat16");
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

scheduler::TileShape tile(const AttentionConfig& config) {
  return {.rows = kRows,
          .kv_tokens = tile_tokens({config.head_dim_qk, config.head_dim_v}),
          .schedule = scheduler::Schedule::kDynamic,
          .order = scheduler::TileOrder::kLpt};
}

DType p_dtype(const AttentionConfig& config) {
  return compute_type(config.q, config.kv, config.ragged_kv);
}

/// The type of codes that all keys and values are; kUnset where they differ. Above kRunToRun a request's bits must not
/// depend on which segments other requests of the batch have: there the configuration alone decides.
DType common_codes(const AttentionParams& params, const LaunchShape& shape) {
  if (is_fp8(shape.kv) && shape.kv == shape.ragged_kv) return shape.kv;
  if (params.determinism > Determinism::kRunToRun) return DType::kUnset;
  DType common = DType::kUnset;
  for (const SegmentParams& segment : params.segments) {
    if (segment.dtype == DType::kUnset) continue;
    if (!is_fp8(segment.dtype) || (common != DType::kUnset && common != segment.dtype)) return DType::kUnset;
    common = segment.dtype;
  }
  return common;
}

/// Where codes can be multiplied as they are: where all inputs are e4m3 and rows see ranges of keys, whatever the step
/// and the layer bring.
bool has_fp8_mma(const AttentionConfig& config) {
  return config.q == DType::kFloat8E4M3 && config.kv == DType::kFloat8E4M3 && config.ragged_kv == DType::kFloat8E4M3 &&
         config.head_dim_qk == kNativeDims.qk && config.head_dim_v == kNativeDims.v &&
         config.mask != MaskKind::kCustom && !config.features.has(Feature::kSoftCap) &&
         !config.features.has(Feature::kAlibi);
}

LaunchClass choose(const AttentionParams& params, const LaunchShape& shape) {
  if (shape.fp8_mma) return launch_native_e4m3_128_128;
  const DimsLaunch& dims = *find_dims(params.head_dim_qk, params.head_dim_v);
  const DType codes = common_codes(params, shape);
  if (codes == DType::kFloat8E4M3 && dims.e4m3 != nullptr) return dims.e4m3;
  if (codes == DType::kFloat8E5M2 && dims.e5m2 != nullptr) return dims.e5m2;
  return compute_type(shape.q, shape.kv, shape.ragged_kv) == DType::kFloat16 ? dims.float16 : dims.bfloat16;
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  const bool cap = params.soft_cap != 0.0f;
  const bool alibi = params.alibi_slopes != nullptr;
  const bool any = params.mask == MaskKind::kCustom || (cap && alibi) || params.soft_cap > kLargestCap;
  const Variant variant = any ? Variant::kAny : cap ? Variant::kCap : alibi ? Variant::kAlibi : Variant::kPlain;
  choose(params, shape)(params, variant, shape.num_workers, stream);
  if (shape.combine) launch_merge(params, shape.num_workers, stream, true, 16);
}

}  // namespace

const AttentionKernel kSm90PrefillKernel{.name = "cuda-sm90-prefill",
                                         .min_compute_capability = 90,
                                         .max_compute_capability = 90,
                                         .refusal = refusal,
                                         .tile = tile,
                                         .p_dtype = p_dtype,
                                         .workers_per_sm = 1,
                                         .tile_cost = 128,
                                         .row_cost = 0,
                                         .start_cost = 160,
                                         .min_split_tokens = 1024,
                                         .l2_swizzle_bytes = int64_t{40} << 20,
                                         .fp8_mma = has_fp8_mma,
                                         .launch = launch};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
