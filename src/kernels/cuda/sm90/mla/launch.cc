#include "kernels/cuda/sm90/mla/launch.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "folio/types/dtype.hpp"
#include "kernels/cuda/common/combine.hpp"
#include "kernels/cuda/sm90/common/tensor_map.hpp"

namespace folio::inline v0::kernels::cuda::sm90::mla {
namespace {

constexpr int32_t kElementBytes = 2;

/// Whether values are their keys' first components.
bool is_v_in_k(const SegmentParams& segment, int32_t num_heads) {
  return segment.k == segment.v && segment.k_strides.page == segment.v_strides.page &&
         segment.k_strides.token == segment.v_strides.token &&
         (num_heads == 1 || segment.k_strides.head == segment.v_strides.head);
}

/// Dimensions, innermost first: 64 components, tokens of a page, column blocks, heads, pages. A TMA tile is one column
/// block of some tokens: see tile_offset.
bool encode_map(CUtensorMap& map, const SegmentParams& segment, const void* data, const KvStrides& strides,
                int32_t head_dim, int32_t num_heads, int32_t tma_tokens) {
  return encode_tensor_map(
      map, {.data = data,
            .element_bytes = kElementBytes,
            .dims = {64, segment.page_size, head_dim / 64, num_heads, std::max<int64_t>(segment.num_pages, 1)},
            .strides = {kElementBytes * strides.token, 128, kElementBytes * strides.head, kElementBytes * strides.page},
            .box = {64, tma_tokens, 1, 1, 1},
            .swizzle_bytes = 128,
            .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
}

/// Queries. Dimensions, innermost first: 64 components, heads, tokens, column blocks. A TMA tile is one column block of
/// some heads of a token. The number of tokens does not matter: TMA takes only rows that are there.
bool encode_q_map(CUtensorMap& map, const AttentionParams& params, int32_t tma_heads) {
  return encode_tensor_map(
      map, {.data = params.q,
            .element_bytes = kElementBytes,
            .dims = {64, params.num_q_heads, INT32_MAX, kColumnBlocks, 1},
            .strides = {kElementBytes * params.q_head_stride, kElementBytes * params.q_token_stride, 128, 128},
            .box = {64, tma_heads, 1, 1, 1},
            .swizzle_bytes = 128,
            .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
}

bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

std::string refusal(const AttentionConfig& config) {
  if (config.head_dim_qk != kHeadDimQk || config.head_dim_v != kHeadDimV) {
    return core::message("head_dim_qk is ", config.head_dim_qk, ", head_dim_v ", config.head_dim_v,
                         "; cuda-sm90-mla takes ", kHeadDimQk, "/", kHeadDimV);
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
  return {.rows = kBlockM,
          .kv_tokens = kBlockN,
          .schedule = scheduler::Schedule::kDynamic,
          .order = scheduler::TileOrder::kLpt};
}

DType p_dtype(const AttentionConfig& config) {
  return config.q;
}

/// CTAs of the combine for each worker. A row tile's partial rows are many and long: of 1 to 24, 4 and 8 were the
/// fastest.
constexpr int32_t kCombineBlocksPerWorker = 8;

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  const bool general =
      params.soft_cap != 0.0f || params.alibi_slopes != nullptr || params.mask.kind == MaskKind::kCustom;
  const auto launch_dtype =
      shape.q == DType::kFloat16 ? launch_instantiation<DType::kFloat16> : launch_instantiation<DType::kBFloat16>;
  launch_dtype(params, general, shape.num_workers, stream);
  if (shape.combine) launch_combine(params, shape.num_workers, stream, true, kCombineBlocksPerWorker);
}

}  // namespace

MlaParams make_params(const AttentionParams& attention) {
  MlaParams params{};
  params.attention = attention;
  const int32_t heads = attention.num_kv_heads;
  params.q_tma_heads = q_tma_heads(attention.num_q_heads / heads);
  params.q_by_tma = params.q_tma_heads > 0 && attention.q_wide && is_16_bit(attention.q_dtype) &&
                    encode_q_map(params.q_map, attention, params.q_tma_heads);
  if (!params.q_by_tma) params.q_tma_heads = 1;
  params.out_16B =
      is_16_bit(attention.out_dtype) &&
      is_aligned_16B(attention.out, {0, attention.out_token_stride, attention.out_head_stride}, kElementBytes);
  for (int32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentParams& segment = attention.segments[i];
    KvCopy& copy = params.copies[i];
    if (segment.dtype == DType::kUnset) continue;
    copy.v_in_k = is_v_in_k(segment, heads);
    copy.aligned = is_aligned_16B(segment.k, segment.k_strides, kElementBytes) &&
                   is_aligned_16B(segment.v, segment.v_strides, kElementBytes);
    copy.page_size = FastDiv(std::max(segment.page_size, 1));
    const int32_t tokens = segment.paged && copy.aligned ? tma_tokens(segment.page_size) : 0;
    if (tokens == 0) continue;
    MlaParams::TensorMaps& maps = params.maps[i];
    if (encode_map(maps.k, segment, segment.k, segment.k_strides, kHeadDimQk, heads, tokens) &&
        (copy.v_in_k || encode_map(maps.v, segment, segment.v, segment.v_strides, kHeadDimV, heads, tokens))) {
      copy.tma_tokens = tokens;
      while (tokens << copy.log2_tma_tiles < kBlockN) ++copy.log2_tma_tiles;
    }
  }
  return params;
}

const AttentionKernel kSm90MlaKernel{.name = "cuda-sm90-mla",
                                     .min_compute_capability = 90,
                                     .max_compute_capability = 90,
                                     .refusal = refusal,
                                     .tile = tile,
                                     .p_dtype = p_dtype,
                                     .workers_per_sm = 1,
                                     .tile_cost = 128,
                                     .row_cost = 0,
                                     .start_cost = 256,
                                     .min_split_tokens = 128,
                                     .launch = launch};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
