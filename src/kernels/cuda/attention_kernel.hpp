#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "folio/types/attention.hpp"
#include "folio/types/device.hpp"
#include "scheduler/mask_bounds.hpp"
#include "scheduler/plan_image.hpp"
#include "scheduler/plan_view.hpp"

/// What a CUDA attention kernel offers and what it is given. Plain types: no CUDA toolkit is needed to read this.
namespace folio::inline v0::kernels::cuda {

/// Most segments of a batch on a GPU: they travel in the kernel's parameters.
inline constexpr int32_t kMaxSegments = 8;

/// Most passes of an op.
inline constexpr int32_t kMaxPasses = 2;

/// Counters of the dynamic tile scheduler. They belong to the plan's buffer, whose plans and runs are all in one
/// stream. They are zero when a launch begins, and the launch leaves them so. The first counts the work tiles claimed
/// beyond the workers' first ones. The second counts the CTAs that have finished; the last CTA resets both. The kernel
/// may use the others in the same way. Each counter has a cache line of its own.
inline constexpr int32_t kTileCounterStride = 32;  ///< uint32_t
inline constexpr int32_t kTileCounters = 4 * kTileCounterStride;

/// Where one segment's keys and values lie. Strides are in elements. All addresses are the device's.
struct SegmentParams {
  bool paged = true;
  DType dtype = DType::kUnset;
  const void* k = nullptr;
  const void* v = nullptr;
  KvStrides k_strides;  ///< `page` is unused by a ragged segment
  KvStrides v_strides;
  int32_t page_size = 1;
  int64_t num_pages = 0;             ///< of the pool, whose ids the table has
  const int32_t* indices = nullptr;  ///< of the page table
  const int32_t* indptr = nullptr;   ///< CSR: of the page table; ragged: first token of each row; null: dense table
  int64_t row_stride = 0;            ///< dense table
  int32_t first_column = 0;
  int32_t num_rows = 0;  ///< paged: of the table; where `indptr` is set, it has one entry more
  Scale k_scale;
  Scale v_scale;
  bool ds_mla = false;      ///< rows of KvFormat::kFp8DsMla; strides are bytes, dtype is fp8_e4m3
  bool wide = false;        ///< every head of every token begins at a multiple of eight elements' size
  int32_t num_indices = 0;  ///< paged: entries that `indices` has at least
};

/// Feature::kRopeLlama; see RopeArgs.
struct RopeParams {
  bool on = false;
  float theta = 1.0f;
  float scale = 1.0f;
};

/// What a pass takes of one SM's time, about; in nanoseconds.
struct PassCost {
  float unit = 0.0f;       ///< for a unit of PlanView::work_cost
  float work_tile = 0.0f;  ///< for a work tile, besides
};

/// One layer's launch. Copied into the kernel's parameters, so that a captured graph needs nothing of the host's.
struct AttentionParams {
  const scheduler::PlanImageHeader* plan = nullptr;
  /// Of the op's other pass, which runs at the same time on other SMs (decision 0076). Null: there is none.
  const scheduler::PlanImageHeader* other_plan = nullptr;
  SegmentParams segments[kMaxSegments];
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  scheduler::MaskRules mask;
  DType out_dtype = DType::kUnset;
  const void* q = nullptr;
  int64_t q_token_stride = 0;
  int64_t q_head_stride = 0;
  DType q_dtype = DType::kUnset;
  Scale q_scale;
  bool q_wide = false;  ///< every head of every token begins at a multiple of eight elements' size
  void* out = nullptr;
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;
  Scale out_scale;         ///< out is fp8: per tensor, divides; NVFP4: the global scale factor, multiplies
  bool out_pairs = false;  ///< two neighbouring components may be written at once: address and strides allow it
  uint8_t* out_block_scales = nullptr;  ///< out is NVFP4; see BlockScaleArgs
  int64_t out_first_row = 0;
  RopeParams rope;
  LseView lse;
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;
  const float* alibi_slopes = nullptr;
  const float* sinks = nullptr;
  const uint8_t* custom_mask = nullptr;  ///< kCustom: bits, laid out as PlanView::mask_byte_indptr says
  Determinism determinism = Determinism::kRunToRun;
  float* partial_acc = nullptr;      ///< [partial rows, head_dim_v]
  float* partial_row_max = nullptr;  ///< [partial rows], base-2 units
  float* partial_row_sum = nullptr;
  /// Schedule::kDynamic: [kTileCounters], all zero when a launch begins; the launch leaves them so. Null if kStatic.
  uint32_t* tile_counters = nullptr;
  /// Of a kernel that combines splits itself: [workers], all zero when a launch begins; the launch leaves them so. It
  /// combines the partials of the work tiles that name a combine tile. Null: a second kernel does it
  /// (AttentionKernel::combine).
  uint32_t* combine_counters = nullptr;
  PassCost prefill_cost;  ///< of the passes of an op that has both
  PassCost decode_cost;
  int64_t other_partials = 0;  ///< partial rows from this pass's first to the other's, where those come behind
};

/// What a launch needs besides the parameters.
struct LaunchShape {
  DType q = DType::kUnset;
  DType kv = DType::kUnset;
  DType ragged_kv = DType::kUnset;
  bool ds_mla = false;  ///< the config's format is kFp8DsMla
  int32_t num_workers = 0;
  int32_t max_rows = INT32_MAX;  ///< no work tile has more packed rows
  bool fp8_mma = false;          ///< see AttentionKernel::fp8_mma
};

struct AttentionKernel {
  const char* name;
  int32_t min_compute_capability;              ///< 10 * major + minor
  int32_t max_compute_capability = INT32_MAX;  ///< of a kernel whose instructions later parts do not have
  /// Empty if it takes the configuration (dtypes resolved), else why not: what was given and what it takes.
  std::string (*refusal)(const AttentionConfig& config);
  scheduler::TileShape (*tile)(const AttentionConfig& config);
  /// What p is rounded to before GEMM1 multiplies it by V: kFloat32 (not at all), kFloat16 or kBFloat16.
  DType (*p_dtype)(const AttentionConfig& config);
  /// What keys and values of KvFormat::kFp8DsMla are rounded to behind their scales: kFloat32 (not at all) or
  /// kBFloat16.
  DType ds_mla_dtype = DType::kFloat32;
  /// Of what it takes: where it is better than the kernels behind it, by measurement. Null: everywhere.
  bool (*preferred)(const AttentionConfig& config) = nullptr;
  int32_t workers_per_sm = 1;
  /// The scheduler's cost of visiting one KV tile with n rows: tile_cost + n * row_cost.
  int32_t tile_cost = 0;
  int32_t row_cost = 1;
  /// The scheduler's cost of beginning and ending an output tile (Schedule::kDynamic: a work tile): start_cost, and
  /// start_row_cost for each row beyond start_free_rows.
  int32_t start_cost = 0;
  int32_t start_row_cost = 0;
  int32_t start_free_rows = 0;
  /// Schedule::kDynamic: the smallest KV split, in tokens.
  int32_t min_split_tokens = 256;
  /// TileOrder::kLpt: bytes of K and V that stay in the L2 cache while row tiles read them; 0 is any number.
  int64_t l2_swizzle_bytes = 0;
  /// Of what it takes: where it multiplies fp8 q, k and v by FP8 MMA and rounds p to e4m3, if that is permitted
  /// (PrepareOptions::allow_fp8_mma). Null: nowhere.
  bool (*fp8_mma)(const AttentionConfig& config) = nullptr;
  /// Of kernels that can share the GPU with another pass (AttentionParams::other_plan). Null: it cannot.
  PassCost (*pass_cost)(const AttentionConfig& config) = nullptr;
  /// Takes AttentionParams::combine_counters: the launch combines its own splits.
  bool combines_in_kernel = false;
  /// Packed rows of a double-height work tile: more than TileShape::rows, by a launch of its own
  /// (LaunchShape::max_rows). For ops whose launches know what their work tiles have (decision 0038). 0: there is no
  /// such launch.
  int32_t double_rows = 0;
  /// Packed rows of low work tiles, which have a launch of their own (LaunchShape::max_rows). An op whose bounds allow
  /// no request more rows has work tiles of so many, unless segments may be shared (decision 0074). 0: there is no such
  /// launch.
  int32_t low_rows = 0;
  /// Enqueues one layer, but for the combine of its splits. Allocates and waits for nothing. Throws
  /// Error(kDeviceError). Null where there are `passes`.
  void (*launch)(const AttentionParams& params, const LaunchShape& shape, Stream stream) = nullptr;
  /// Enqueues the combine, for launches that may have split something and do not combine themselves. It takes the other
  /// pass's splits, too (AttentionParams::other_partials).
  void (*combine)(const AttentionParams& params, const LaunchShape& shape, Stream stream) = nullptr;
  /// Of an op of several passes (decision 0032): the kernel of each, in the order of their launches, at most
  /// kMaxPasses, for a configuration that `refusal` has nothing against. A pass takes the requests whose packed rows
  /// fit one of its row tiles, unless a later pass takes them; the first pass takes every request that is left. Such an
  /// op uses the fields up to `preferred` alone. Null: this kernel is the op's only pass.
  std::span<const AttentionKernel* const> (*passes)(const AttentionConfig& config) = nullptr;
};

/// Every CUDA attention kernel of this build, the preferred first.
std::span<const AttentionKernel* const> attention_kernels();

}  // namespace folio::inline v0::kernels::cuda
