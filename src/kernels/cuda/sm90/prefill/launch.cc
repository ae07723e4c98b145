#include "kernels/cuda/sm90/prefill/launch.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "folio/types/dtype.hpp"
#include "kernels/cuda/common/combine.hpp"
#include "kernels/cuda/common/compute_type.hpp"
#include "kernels/cuda/sm90/common/tensor_map.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {
namespace {

constexpr const char* kName = "cuda-sm90-prefill";

// Tensor maps.

/// From page to page in steps of kAtomRows tokens; 0 where that is no whole number.
int32_t count_page_atoms(const KvStrides& strides) {
  const int64_t step = kAtomRows * strides.token;
  if (step <= 0 || strides.page <= 0 || strides.page % step != 0 || strides.page / step > INT32_MAX) return 0;
  return static_cast<int32_t>(strides.page / step);
}

/// K or V of a segment. Dimensions, innermost first: components of an atom's row, tokens of an atom, atoms side by
/// side, heads, atoms of tokens, of which pages are a whole number apart. A TMA tile is all components of one head of
/// `tma_tokens` tokens: see tile_offset, fp8_offset.
bool make_kv_map(CUtensorMap& map, const SegmentParams& segment, const void* data, const KvStrides& strides,
                 int32_t head_dim, int32_t num_heads, int32_t tma_tokens, int32_t bytes) {
  if (strides.head < 0) return false;
  const int64_t last_page = std::max<int64_t>(segment.num_pages, 1) - 1;
  const int64_t atoms = last_page * count_page_atoms(strides) + segment.page_size / kAtomRows;
  if (atoms > INT32_MAX) return false;
  const int32_t width = bytes == 1 ? kFp8RowBytes : swizzle_bytes(head_dim);
  const int32_t components = width / bytes;
  const int32_t columns = head_dim / components;
  return encode_tensor_map(
      map, {.data = data,
            .element_bytes = bytes,
            .dims = {components, kAtomRows, columns, num_heads, atoms},
            .strides = {bytes * strides.token, width, bytes * strides.head, bytes * kAtomRows * strides.token},
            .box = {components, kAtomRows, columns, 1, tma_tokens / kAtomRows},
            .swizzle_bytes = width,
            .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
}

/// Q or the output. Dimensions, innermost first: components of an atom's row, heads, tokens, atoms side by side. The
/// number of tokens does not matter: TMA takes only work tiles whose rows are all there.
bool make_row_map(CUtensorMap& map, const AttentionParams& params, const void* data, DType dtype, int64_t token_stride,
                  int64_t head_stride, int32_t head_dim) {
  constexpr int32_t kBytes = 2;
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  if (kWarpgroupRows % group_size != 0 || size_of(dtype) != kBytes) return false;
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  for (const int64_t stride : {head_stride, token_stride}) {
    if (stride <= 0 || stride * kBytes % 16 != 0) return false;
  }
  const int32_t width = swizzle_bytes(head_dim);
  const int32_t components = width / kBytes;
  const int32_t columns = head_dim / components;
  return encode_tensor_map(map, {.data = data,
                                 .element_bytes = kBytes,
                                 .dims = {components, params.num_q_heads, INT32_MAX, columns, 1},
                                 .strides = {kBytes * head_stride, kBytes * token_stride, width, width},
                                 .box = {components, group_size, kWarpgroupRows / group_size, columns, 1},
                                 .swizzle_bytes = width,
                                 .l2_promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
}

}  // namespace

PrefillParams make_params(const AttentionParams& attention, const HeadDims& dims, int32_t kv_bytes) {
  PrefillParams params{};
  params.attention = attention;
  for (int32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentParams& segment = attention.segments[i];
    SegmentLoad& load = params.loads[i];
    load.page_size = FastDiv(std::max(segment.page_size, 1));
    if (segment.dtype == DType::kUnset || size_of(segment.dtype) != kv_bytes) continue;
    load.is_16B_aligned = is_aligned_16B(segment.k, segment.k_strides, kv_bytes) &&
                          is_aligned_16B(segment.v, segment.v_strides, kv_bytes);
    const int32_t most_tokens = kv_bytes == 1 ? kMaxFp8TmaTokens : block_n(dims);
    const int32_t tma_tokens =
        segment.paged && load.is_16B_aligned ? tma_tile_tokens(segment.page_size, most_tokens) : 0;
    load.atoms_per_page = count_page_atoms(segment.k_strides);
    if (tma_tokens == 0 || load.atoms_per_page == 0) continue;
    if (load.atoms_per_page != count_page_atoms(segment.v_strides)) continue;
    const int32_t heads = attention.num_kv_heads;
    if (make_kv_map(params.maps[i].k, segment, segment.k, segment.k_strides, dims.qk, heads, tma_tokens, kv_bytes) &&
        make_kv_map(params.maps[i].v, segment, segment.v, segment.v_strides, dims.v, heads, tma_tokens, kv_bytes)) {
      load.tma_tokens = tma_tokens;
    }
  }
  params.group = FastDiv(attention.num_q_heads / attention.num_kv_heads);
  params.q_by_tma = kv_bytes == 2 && make_row_map(params.q, attention, attention.q, attention.q_dtype,
                                                  attention.q_token_stride, attention.q_head_stride, dims.qk);
  params.out_by_tma =
      q_buffers(dims) == kTileBuffers && make_row_map(params.output, attention, attention.out, attention.out_dtype,
                                                      attention.out_token_stride, attention.out_head_stride, dims.v);
  params.out_16B_aligned = reinterpret_cast<uintptr_t>(attention.out) % 16 == 0 &&
                           (attention.out_token_stride | attention.out_head_stride) % kElementsPer16B == 0;
  return params;
}

namespace {

// Dispatch.

using Launch = void (*)(const AttentionParams& attention, Variant variant, int32_t num_workers, Stream stream);

/// The instantiations of one pair of head dimensions. Without one for an fp8 dtype, the kernel of a 16-bit type upcasts
/// fp8 data in a slow loop.
struct Instantiations {
  HeadDims dims;
  Launch bfloat16;
  Launch float16;
  Launch e4m3 = nullptr;
  Launch e5m2 = nullptr;
};
template <int32_t DimQk, int32_t DimV>
constexpr Instantiations kOf{
    {DimQk, DimV}, launch_prefill<__nv_bfloat16, DimQk, DimV>, launch_prefill<__half, DimQk, DimV>};
constexpr Instantiations kInstantiations[] = {kOf<64, 64>,
                                              kOf<96, 96>,
                                              {{128, 128},
                                               launch_prefill<__nv_bfloat16, 128, 128>,
                                               launch_prefill<__half, 128, 128>,
                                               launch_prefill<__half, 128, 128, Fp8::kE4M3>,
                                               launch_prefill<__half, 128, 128, Fp8::kE5M2>},
                                              kOf<192, 128>,
                                              kOf<256, 256>};
constexpr Launch kFp8MmaLaunch = launch_prefill<__half, kFp8MmaDims.qk, kFp8MmaDims.v, Fp8::kE4M3, true>;

const Instantiations* find_instantiations(int32_t dim_qk, int32_t dim_v) {
  for (const Instantiations& instantiations : kInstantiations) {
    if (instantiations.dims.qk == dim_qk && instantiations.dims.v == dim_v) return &instantiations;
  }
  return nullptr;
}

std::string refusal(const AttentionConfig& config) {
  if (find_instantiations(config.head_dim_qk, config.head_dim_v) == nullptr) {
    return core::message("head_dim_qk is ", config.head_dim_qk, ", head_dim_v ", config.head_dim_v,
                         "; cuda-sm90-prefill takes 64/64, 96/96, 128/128, 192/128 and 256/256");
  }
  if (std::string why = refuse_inputs(config, kName); !why.empty()) return why;
  if (std::string why = refuse_output(config, kName); !why.empty()) return why;
  if (std::string why = refuse_unless_strided(config.kv_format); !why.empty()) return why;
  return refuse_rotary_embedding(config, kName);
}

scheduler::TileShape tile(const AttentionConfig& config) {
  return {.rows = kBlockM,
          .kv_tokens = block_n({config.head_dim_qk, config.head_dim_v}),
          .schedule = scheduler::Schedule::kDynamic,
          .order = scheduler::TileOrder::kLpt};
}

constexpr int32_t kTileCost = 128;

DType p_dtype(const AttentionConfig& config) {
  return compute_type(config.q, config.kv, config.ragged_kv);
}

/// Whether FP8 MMA is possible whatever the step and the layer bring: all inputs are e4m3, and rows see ranges of keys.
bool has_fp8_mma(const AttentionConfig& config) {
  return config.q == DType::kFloat8E4M3 && config.kv == DType::kFloat8E4M3 && config.ragged_kv == DType::kFloat8E4M3 &&
         config.head_dim_qk == kFp8MmaDims.qk && config.head_dim_v == kFp8MmaDims.v &&
         config.mask != MaskKind::kCustom && !config.features.has(Feature::kSoftCap) &&
         !config.features.has(Feature::kAlibi);
}

Launch choose_launch(const AttentionParams& params, const LaunchShape& shape) {
  if (shape.fp8_mma) return kFp8MmaLaunch;
  const Instantiations& instantiations = *find_instantiations(params.head_dim_qk, params.head_dim_v);
  const bool by_config = is_fp8(shape.kv) && shape.kv == shape.ragged_kv;
  const DType fp8 = by_config ? shape.kv : common_fp8_type(params);
  if (fp8 == DType::kFloat8E4M3 && instantiations.e4m3 != nullptr) return instantiations.e4m3;
  if (fp8 == DType::kFloat8E5M2 && instantiations.e5m2 != nullptr) return instantiations.e5m2;
  const bool is_half = compute_type(shape.q, shape.kv, shape.ragged_kv) == DType::kFloat16;
  return is_half ? instantiations.float16 : instantiations.bfloat16;
}

Variant choose_variant(const AttentionParams& params) {
  const bool cap = params.soft_cap != 0.0f;
  const bool alibi = params.alibi_slopes != nullptr;
  const bool mask = params.mask.kind == MaskKind::kCustom;
  if ((mask && (cap || alibi)) || (cap && alibi) || params.soft_cap > kMaxFixedCap) return Variant::kAny;
  if (mask) return Variant::kMask;
  return cap ? Variant::kCap : alibi ? Variant::kAlibi : Variant::kPlain;
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  choose_launch(params, shape)(params, choose_variant(params), shape.num_workers, stream);
}

void combine(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  launch_combine(params, shape.num_workers, stream, true, 16);
}

/// At the 680 TFLOP/s of long prompts on 132 SMs; fp8 that is dequantized takes 1.3 times as long. Short prompts show
/// what a work tile takes besides.
PassCost pass_cost(const AttentionConfig& config) {
  constexpr float kFlopsPerNs = 5200.0f;
  const HeadDims dims{config.head_dim_qk, config.head_dim_v};
  const float flops = 2.0f * kBlockM * static_cast<float>(block_n(dims) * (dims.qk + dims.v));
  const bool dequantizes = is_fp8(config.kv) && !is_fp8(config.q);
  return {.unit = flops / kFlopsPerNs * (dequantizes ? 1.3f : 1.0f) / kTileCost, .work_tile = 3000.0f};
}

}  // namespace

const AttentionKernel kSm90PrefillKernel{.name = kName,
                                         .min_compute_capability = 90,
                                         .max_compute_capability = 90,
                                         .refusal = refusal,
                                         .tile = tile,
                                         .p_dtype = p_dtype,
                                         .workers_per_sm = 1,
                                         .tile_cost = kTileCost,
                                         .row_cost = 0,
                                         .start_cost = 160,
                                         .min_split_tokens = 1024,
                                         .l2_swizzle_bytes = int64_t{40} << 20,
                                         .fp8_mma = has_fp8_mma,
                                         .pass_cost = pass_cost,
                                         .launch = launch,
                                         .combine = combine};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
