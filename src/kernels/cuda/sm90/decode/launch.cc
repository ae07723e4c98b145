#include "kernels/cuda/sm90/decode/launch.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "kernels/cuda/common/combine.hpp"
#include "kernels/cuda/common/compute_type.hpp"
#include "kernels/cuda/sm90/common/tensor_map.hpp"

namespace folio::inline v0::kernels::cuda::sm90::decode {
namespace {

constexpr const char* kName = "cuda-sm90-decode";

struct Instantiation {
  DType type;
  int32_t dim_qk;
  int32_t dim_v;
  void (*launch)(const AttentionParams& params, const LaunchShape& shape, Stream stream);
};
constexpr Instantiation kInstantiations[] = {
#define FOLIO_ENTRY(type, dim_qk, dim_v) {type, dim_qk, dim_v, launch_instantiation<type, dim_qk, dim_v>},
    FOLIO_SM90_DECODE_INSTANTIATIONS(FOLIO_ENTRY)
#undef FOLIO_ENTRY
};

/// Null where there is none.
const Instantiation* find_instantiation(DType type, int32_t dim_qk, int32_t dim_v) {
  for (const Instantiation& one : kInstantiations) {
    if (one.type == type && one.dim_qk == dim_qk && one.dim_v == dim_v) return &one;
  }
  return nullptr;
}

std::string refusal(const AttentionConfig& config) {
  if (find_instantiation(DType::kBFloat16, config.head_dim_qk, config.head_dim_v) == nullptr) {
    return core::message("head_dim_qk is ", config.head_dim_qk, ", head_dim_v ", config.head_dim_v,
                         "; cuda-sm90-decode takes 64/64, 96/96, 128/128, 192/128 and 256/256");
  }
  if (std::string why = refuse_inputs(config, kName); !why.empty()) return why;
  if (std::string why = refuse_output(config, kName); !why.empty()) return why;
  if (std::string why = refuse_unless_strided(config.kv_format); !why.empty()) return why;
  return refuse_rotary_embedding(config, kName);
}

scheduler::TileShape tile(const AttentionConfig& config) {
  const HeadDims dims{config.head_dim_qk, config.head_dim_v};
  return {.rows = work_tile_rows(config.num_q_heads / config.num_kv_heads),
          .kv_tokens = schedule_tokens(dims),
          .schedule = scheduler::Schedule::kDynamic};
}

constexpr int32_t kTileCost = 96;

DType p_dtype(const AttentionConfig& config) {
  return compute_type(config.q, config.kv, config.ragged_kv);
}

/// Where no instantiation keeps fp8 data in shared memory, the producer upcasts it on the way there.
const Instantiation& choose(const AttentionParams& params, const LaunchShape& shape) {
  const Instantiation* const fp8 = find_instantiation(common_fp8_type(params), params.head_dim_qk, params.head_dim_v);
  if (fp8 != nullptr) return *fp8;
  return *find_instantiation(compute_type(shape.q, shape.kv, shape.ragged_kv), params.head_dim_qk, params.head_dim_v);
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  choose(params, shape).launch(params, shape, stream);
}

void combine(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  // As many CTAs as wait beside this kernel's, and more where a combine has more rows than a CTA has warps.
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t rows = shape.max_rows <= kTileRows ? group_size : shape.max_rows;
  launch_combine(params, shape.num_workers, stream, true, std::clamp((rows + 3) / 4, 1, 4));
}

/// At the 4.4 TB/s of long batches on 132 SMs.
PassCost pass_cost(const AttentionConfig& config) {
  constexpr float kBytesPerNs = 33.0f;
  const HeadDims dims{config.head_dim_qk, config.head_dim_v};
  const auto bytes = static_cast<float>(schedule_tokens(dims) * (dims.qk + dims.v) * size_of(config.kv));
  return {.unit = bytes / kBytesPerNs / kTileCost, .work_tile = 0.0f};
}

/// Dimensions, innermost first: a swizzle row's components, tokens of a page, a token's swizzle rows, heads, pages. A
/// box is all components of one head of `copy_tokens` tokens.
bool make_map(CUtensorMap& map, const SegmentParams& segment, const void* data, const KvStrides& strides,
              int32_t head_dim, int32_t bytes, int32_t num_heads, int32_t copy_tokens) {
  const int32_t width = swizzle_bytes(head_dim, bytes);
  const int32_t columns = width / bytes;
  return is_aligned_16B(data, strides, bytes) &&
         encode_tensor_map(map, {.data = data,
                                 .element_bytes = bytes,
                                 .dims = {columns, segment.page_size, head_dim / columns, num_heads,
                                          std::max<int64_t>(segment.num_pages, 1)},
                                 .strides = {bytes * strides.token, width, bytes * strides.head, bytes * strides.page},
                                 .box = {columns, copy_tokens, head_dim / columns, 1, 1},
                                 .swizzle_bytes = width,
                                 // Promotion fetches more than the box: 5 % of the bandwidth.
                                 .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_NONE});
}

}  // namespace

void set_copies(DecodeParams& params, const HeadDims& dims) {
  const AttentionParams& attention = params.attention;
  for (int32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentParams& segment = attention.segments[i];
    params.copy_tokens[i] = kCpAsync;
    params.cp_async_16B[i] = false;
    if (segment.dtype == DType::kUnset || size_of(segment.dtype) != dims.bytes) continue;
    params.cp_async_16B[i] = is_aligned_16B(segment.k, segment.k_strides, dims.bytes) &&
                             is_aligned_16B(segment.v, segment.v_strides, dims.bytes);
    if (!segment.paged || segment.page_size % kTmaHalfTile != 0) continue;
    const int32_t copy_tokens = segment.page_size % kTmaWholeTile == 0 ? kTmaWholeTile : kTmaHalfTile;
    const int32_t heads = attention.num_kv_heads;
    if (make_map(params.maps[i].k, segment, segment.k, segment.k_strides, dims.qk, dims.bytes, heads, copy_tokens) &&
        make_map(params.maps[i].v, segment, segment.v, segment.v_strides, dims.v, dims.bytes, heads, copy_tokens)) {
      params.copy_tokens[i] = copy_tokens;
    }
  }
}

const AttentionKernel kSm90DecodeKernel{.name = kName,
                                        .min_compute_capability = 90,
                                        .max_compute_capability = 90,
                                        .refusal = refusal,
                                        .tile = tile,
                                        .p_dtype = p_dtype,
                                        .workers_per_sm = 1,
                                        .tile_cost = kTileCost,
                                        .row_cost = 1,
                                        .start_cost = 48,
                                        .pass_cost = pass_cost,
                                        .double_rows = kMaxRows,
                                        .launch = launch,
                                        .combine = combine};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
