#include "kernels/cuda/sm90/mla/launch.hpp"

#include <algorithm>
#include <iterator>

#include "core/error.hpp"
#include "folio/types/ds_mla.hpp"
#include "folio/types/dtype.hpp"
#include "kernels/cuda/common/combine.hpp"
#include "kernels/cuda/common/compute_type.hpp"
#include "kernels/cuda/sm90/common/tensor_map.hpp"

namespace folio::inline v0::kernels::cuda::sm90::mla {
namespace {

constexpr const char* kName = "cuda-sm90-mla";

/// Whether values are their keys' first components.
bool is_v_in_k(const SegmentParams& segment, int32_t num_heads) {
  return segment.k == segment.v && segment.k_strides.page == segment.v_strides.page &&
         segment.k_strides.token == segment.v_strides.token &&
         (num_heads == 1 || segment.k_strides.head == segment.v_strides.head);
}

/// Dimensions, innermost first: 64 components, tokens of a page, column blocks, heads, pages. A TMA tile is one column
/// block of some tokens: see tile_offset. fp8: all components, tokens, heads, pages; a TMA tile has 128 components, and
/// those beyond the last are zeros: see fp8_block_offset.
bool encode_map(CUtensorMap& map, const SegmentParams& segment, const void* data, const KvStrides& strides,
                int32_t head_dim, int32_t num_heads, int32_t tma_tokens) {
  const int64_t pages = std::max<int64_t>(segment.num_pages, 1);
  if (is_fp8(segment.dtype)) {
    return encode_tensor_map(map, {.data = data,
                                   .element_bytes = 1,
                                   .dims = {head_dim, segment.page_size, num_heads, pages, 1},
                                   .strides = {strides.token, strides.head, strides.page, strides.page},
                                   .box = {128, tma_tokens, 1, 1, 1},
                                   .swizzle_bytes = 128,
                                   .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
  }
  return encode_tensor_map(map, {.data = data,
                                 .element_bytes = 2,
                                 .dims = {64, segment.page_size, head_dim / 64, num_heads, pages},
                                 .strides = {2 * strides.token, 128, 2 * strides.head, 2 * strides.page},
                                 .box = {64, tma_tokens, 1, 1, 1},
                                 .swizzle_bytes = 128,
                                 .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
}

/// Rows of KvFormat::kFp8DsMla: latents as other fp8 keys, RoPE parts as 16-bit keys of one column block, scales one
/// token after the other.
bool encode_ds_mla_maps(MlaParams::TensorMaps& maps, const SegmentParams& segment, int32_t tma_tokens) {
  const auto* const rows = static_cast<const std::byte*>(segment.k);
  const KvStrides& strides = segment.k_strides;
  const int64_t pages = std::max<int64_t>(segment.num_pages, 1);
  const auto encode = [&](CUtensorMap& map, int32_t offset, int32_t element_bytes, int32_t elements, int32_t box,
                          int32_t swizzle_bytes) {
    return encode_tensor_map(map, {.data = rows + offset,
                                   .element_bytes = element_bytes,
                                   .dims = {elements, segment.page_size, 1, pages, 1},
                                   .strides = {strides.token, strides.page, strides.page, strides.page},
                                   .box = {box, tma_tokens, 1, 1, 1},
                                   .swizzle_bytes = swizzle_bytes,
                                   .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
  };
  constexpr int32_t kScaleElements = 4 * kDsMlaBlocks / 2;  // as elements of 2 bytes
  return encode(maps.k, 0, 1, kDsMlaLatentDim, 128, 128) &&
         encode(maps.v, kDsMlaRopeOffset, 2, kDsMlaRopeDim, kDsMlaRopeDim, 128) &&
         encode(maps.scales, kDsMlaScalesOffset, 2, kScaleElements, kScaleElements, 0);
}

/// Queries. Dimensions, innermost first: 64 components, heads, tokens, column blocks. A TMA tile is one column block of
/// some heads of a token. The number of tokens does not matter: TMA takes only rows that are there.
bool encode_q_map(CUtensorMap& map, const AttentionParams& params, int32_t tma_heads) {
  return encode_tensor_map(map, {.data = params.q,
                                 .element_bytes = 2,
                                 .dims = {64, params.num_q_heads, INT32_MAX, params.head_dim_qk / 64, 1},
                                 .strides = {2 * params.q_head_stride, 2 * params.q_token_stride, 128, 128},
                                 .box = {64, tma_heads, 1, 1, 1},
                                 .swizzle_bytes = 128,
                                 .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
}

std::string refusal(const AttentionConfig& config) {
  if (std::count(std::begin(kHeadDimsQk), std::end(kHeadDimsQk), config.head_dim_qk) == 0 ||
      config.head_dim_v != kHeadDimV) {
    return core::message("head_dim_qk is ", config.head_dim_qk, ", head_dim_v ", config.head_dim_v,
                         "; cuda-sm90-mla takes 576/512 and 512/512");
  }
  if (std::string why = refuse_inputs(config, kName); !why.empty()) return why;
  if (config.kv_format == KvFormat::kFp8DsMla &&
      compute_type(config.q, config.kv, config.ragged_kv) != DType::kBFloat16) {
    return core::message(
        "q is ", config.q, ", ragged_kv ", config.ragged_kv,
        " with fp8_ds_mla, whose RoPE part is bfloat16; cuda-sm90-mla takes bfloat16 and fp8 beside it");
  }
  if (std::string why = refuse_output(config, kName); !why.empty()) return why;
  if (std::string why = refuse_unless_strided_or_ds_mla(config.kv_format); !why.empty()) return why;
  return refuse_rotary_embedding(config, kName);
}

scheduler::TileShape tile(const AttentionConfig&) {
  return {.rows = kBlockM,
          .kv_tokens = kBlockN,
          .schedule = scheduler::Schedule::kDynamic,
          .order = scheduler::TileOrder::kLpt};
}

DType p_dtype(const AttentionConfig& config) {
  return compute_type(config.q, config.kv, config.ragged_kv);
}

/// CTAs of the combine for each worker. A row tile's partial rows are many and long: of 1 to 24, 4 and 8 were the
/// fastest.
constexpr int32_t kCombineBlocksPerWorker = 8;

/// Whether all keys and values are fp8. Above kRunToRun the configuration alone decides: a request's bits must not
/// depend on the segments of other requests.
bool is_all_fp8(const AttentionParams& params, const LaunchShape& shape) {
  if (!is_fp8(shape.kv) && !is_fp8(shape.ragged_kv)) return false;
  if (params.determinism > Determinism::kRunToRun) return is_fp8(shape.kv) && is_fp8(shape.ragged_kv);
  return std::all_of(std::begin(params.segments), std::end(params.segments), [](const SegmentParams& segment) {
    return segment.dtype == DType::kUnset || is_fp8(segment.dtype);
  });
}

/// The MMA's type. fp8 takes fewer instructions to dequantize to float16 than to bfloat16. Scales and RoPE parts of
/// fp8_ds_mla need bfloat16's range.
DType mma_dtype(const AttentionParams& params, const LaunchShape& shape) {
  return !shape.ds_mla && is_all_fp8(params, shape) ? DType::kFloat16
                                                    : compute_type(shape.q, shape.kv, shape.ragged_kv);
}

template <DType kDType, Fp8 kFp8>
void launch_swapped(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  const bool rope = params.head_dim_qk > kHeadDimV;
  const auto launch =
      rope ? launch_swap_ab<kDType, kHeadDimsQk[0], kFp8, false> : launch_swap_ab<kDType, kHeadDimsQk[1], kFp8, false>;
  launch(params, shape.num_workers, stream);
}

bool has_ds_mla(const AttentionParams& params) {
  return std::any_of(std::begin(params.segments), std::end(params.segments),
                     [](const SegmentParams& segment) { return segment.ds_mla; });
}
/// Whether all keys and values are rows of fp8_ds_mla. Above kRunToRun the answer is no, as in common_fp8_type.
bool is_all_ds_mla(const AttentionParams& params) {
  return params.determinism <= Determinism::kRunToRun &&
         std::all_of(std::begin(params.segments), std::end(params.segments),
                     [](const SegmentParams& segment) { return segment.dtype == DType::kUnset || segment.ds_mla; });
}

/// Launches MMAs with swapped operands, if that is possible. Above kRunToRun it is not: a request's bits must not
/// depend on the rows of other requests.
bool try_swap_ab(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  if (params.determinism > Determinism::kRunToRun || shape.max_rows > kSwapAbRows) return false;
  if (has_ds_mla(params)) {
    if (!is_all_ds_mla(params)) return false;
    launch_swap_ab<DType::kFloat16, kHeadDimsQk[0], Fp8::kE4M3, true>(params, shape.num_workers, stream);
    return true;
  }
  const DType fp8 = common_fp8_type(params);
  const bool has_fp8 = std::any_of(std::begin(params.segments), std::end(params.segments),
                                   [](const SegmentParams& segment) { return is_fp8(segment.dtype); });
  if (fp8 == DType::kFloat8E4M3) {
    launch_swapped<DType::kFloat16, Fp8::kE4M3>(params, shape, stream);
  } else if (fp8 == DType::kFloat8E5M2) {
    launch_swapped<DType::kFloat16, Fp8::kE5M2>(params, shape, stream);
  } else if (has_fp8) {
    return false;  // segments differ
  } else if (compute_type(shape.q, shape.kv, shape.ragged_kv) == DType::kFloat16) {
    launch_swapped<DType::kFloat16, Fp8::kNone>(params, shape, stream);
  } else {
    launch_swapped<DType::kBFloat16, Fp8::kNone>(params, shape, stream);
  }
  return true;
}

void launch_by_rows(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  const bool general =
      params.soft_cap != 0.0f || params.alibi_slopes != nullptr || params.mask.kind == MaskKind::kCustom;
  if (has_ds_mla(params) && is_all_ds_mla(params)) {
    const auto launch = general ? launch_rows_ds_mla<true> : launch_rows_ds_mla<false>;
    return launch(params, shape.num_workers, stream);
  }
  const bool float16 = mma_dtype(params, shape) == DType::kFloat16;
  const bool rope = params.head_dim_qk > kHeadDimV;
  const auto launch =
      float16 ? (rope ? launch_rows<DType::kFloat16, kHeadDimsQk[0]> : launch_rows<DType::kFloat16, kHeadDimsQk[1]>)
              : (rope ? launch_rows<DType::kBFloat16, kHeadDimsQk[0]> : launch_rows<DType::kBFloat16, kHeadDimsQk[1]>);
  const bool has_fp8 = is_fp8(shape.q) || is_fp8(shape.kv) || is_fp8(shape.ragged_kv);
  launch(params, general, has_fp8, shape.num_workers, stream);
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  if (!try_swap_ab(params, shape, stream)) launch_by_rows(params, shape, stream);
}

void combine(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  launch_combine(params, shape.num_workers, stream, true, kCombineBlocksPerWorker);
}

}  // namespace

MlaParams make_params(const AttentionParams& attention, DType mma_dtype) {
  MlaParams params{};
  params.attention = attention;
  const int32_t heads = attention.num_kv_heads;
  params.q_tma_heads = q_tma_heads(attention.num_q_heads / heads);
  params.q_by_tma = params.q_tma_heads > 0 && attention.q_wide && attention.q_dtype == mma_dtype &&
                    encode_q_map(params.q_map, attention, params.q_tma_heads);
  if (!params.q_by_tma) params.q_tma_heads = 1;
  params.out_16B = is_16_bit(attention.out_dtype) &&
                   is_aligned_16B(attention.out, {0, attention.out_token_stride, attention.out_head_stride}, 2);
  for (int32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentParams& segment = attention.segments[i];
    KvCopy& copy = params.copies[i];
    if (segment.dtype == DType::kUnset) continue;
    copy.ds_mla = segment.ds_mla;
    copy.v_in_k = is_v_in_k(segment, heads);
    const auto element_bytes = static_cast<int32_t>(size_of(segment.dtype));
    copy.aligned = is_aligned_16B(segment.k, segment.k_strides, element_bytes) &&
                   is_aligned_16B(segment.v, segment.v_strides, element_bytes);
    copy.page_size = FastDiv(std::max(segment.page_size, 1));
    const int32_t tokens = segment.paged && copy.aligned ? tma_tokens(segment.page_size) : 0;
    if (tokens == 0) continue;
    MlaParams::TensorMaps& maps = params.maps[i];
    const auto encode = [&] {
      if (copy.ds_mla) return encode_ds_mla_maps(maps, segment, tokens);
      return encode_map(maps.k, segment, segment.k, segment.k_strides, attention.head_dim_qk, heads, tokens) &&
             (copy.v_in_k || encode_map(maps.v, segment, segment.v, segment.v_strides, kHeadDimV, heads, tokens));
    };
    if (encode()) {
      copy.tma_tokens = tokens;
      while (tokens << copy.log2_tma_tiles < kBlockN) ++copy.log2_tma_tiles;
    }
  }
  return params;
}

const AttentionKernel kSm90MlaKernel{.name = kName,
                                     .min_compute_capability = 90,
                                     .max_compute_capability = 90,
                                     .refusal = refusal,
                                     .tile = tile,
                                     .p_dtype = p_dtype,
                                     .ds_mla_dtype = DType::kBFloat16,
                                     .workers_per_sm = 1,
                                     .tile_cost = 128,
                                     .row_cost = 0,
                                     .start_cost = 256,
                                     .min_split_tokens = 128,
                                     .low_rows = kSwapAbRows,
                                     .launch = launch,
                                     .combine = combine};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
