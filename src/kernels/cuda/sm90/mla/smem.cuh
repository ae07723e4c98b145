#pragma once

#include <type_traits>

#include "folio/types/ds_mla.hpp"
#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/sm90/mla/launch.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"

/// Shared storage and barriers.
namespace folio::inline v0::kernels::cuda::sm90::mla {

constexpr uint32_t kAllLanes = 0xffffffffu;

/// Named barriers.
constexpr int32_t kProducerBarrier = 1;
constexpr int32_t kConsumerBarrier = 2;  ///< of the first consumer; the second's follows
constexpr int32_t kGemm0Barrier = 4;     ///< of both: the first has issued GEMM0 of a pair's even tile

/// The rows of a work tile. Rows beyond the work tile's see nothing.
struct RowInfo {
  int64_t mask_bit[kBlockM];    ///< custom mask: local token j is bit mask_bit + j of the mask's bytes,
  int32_t mask_begin[kBlockM];  ///< if j >= mask_begin; earlier tokens are visible
  int32_t position[kBlockM];
  int32_t visible_begin[kBlockM];  ///< local tokens
  int32_t visible_end[kBlockM];
  int32_t token[kBlockM];
  int32_t q_head[kBlockM];
  float scale[kBlockM];  ///< of scores: to base-2 logits, but to natural logits where there is a soft cap or a bias
  float v_scale[kBlockM];
};

/// A work tile, as the producer describes it to the consumers.
struct WorkTileContext {
  scheduler::WorkTile work_tile;
  VisibleRange visible;
  KvShard shard;
  int64_t first_pos;
  int32_t num_rows;
  int32_t last_kv_tile;  ///< of kBlockN local tokens, from local token 0. The mainloop goes from the last to the first
  int32_t num_kv_tiles;
  bool custom_mask;    ///< the custom mask's bits apply
  bool negate_scores;  ///< some row's scale is not positive
  bool v_in_k;         ///< values are inside keys; otherwise a tile of V follows each tile of K in the pipeline
  bool by_threads;     ///< keys and values are copied by threads, not by TMA
  bool out_16B;        ///< the output is of a 16-bit type and may be written in chunks of 16 bytes
  bool done;           ///< no work tile: the CTA has no more work
};

/// What the consumer that computed P of a KV tile tells the other one, row by row: row_max, this tile included, and the
/// factor of what was accumulated before. One each for even and odd KV tiles.
struct TileStats {
  float2 rows[kBlockM];  ///< row_max, the factor
  /// For each warp: 1 if any factor of the tile is not 1. fp8_ds_mla: that is the lowest bit of the unit, this tile
  /// included, which is a power of two.
  uint32_t rescales[kWarpgroupWarps];
};

constexpr int32_t kMaxStages = Layout<kBlockM, 1>::kStages;

/// The part of shared memory of fixed size. "Phase n" is the barrier's phase.
struct SharedStorage {
  RowInfo rows[kWorkTileSlots];
  WorkTileContext contexts[kWorkTileSlots];
  float q_factors[kBlockM];  ///< what rows of Q were divided by when they became float16
  TileStats tile_stats[2];
  float row_sum[kWorkTileSlots][kConsumers][kBlockM];  ///< of a work tile, before the cross-warp reduction
  /// For mixed KV tiles: not 0 if a producer warp has found NaN or Inf in V, by the halves of V.
  uint8_t nonfinite[kMaxStages][kConsumers][kWarpgroupWarps];
  uint64_t work_tile_full[kWorkTileSlots];   ///< phase n: the slot's work tile number n is described, its Q loaded
  uint64_t work_tile_empty[kWorkTileSlots];  ///< phase n: the consumers have finished it
  uint64_t q_empty;                          ///< phase n: the consumers have read Q of work tile n
  uint64_t kv_full[kMaxStages][kKvParts];
  uint64_t kv_empty[kMaxStages][kKvParts];
  uint64_t v_landed[kMaxStages];                       ///< V that the producer scans or zeroes before it commits
  uint64_t fp8_landed[RowsLayout::kStages][kKvParts];  ///< fp8 data of a part: see Fp8Producer
  /// Between the two warps, one of each consumer, that have the same rows. For even and for odd KV tiles, phase n: P
  /// and TileStats of KV tile 2n (+ 1) are written. For row_sum_full, phase n: row_sum of work tile n is written.
  uint64_t p_full[2][kWarpgroupWarps];
  uint64_t row_sum_full[kWarpgroupWarps];
};

/// Of rows of fp8_ds_mla in a KV tile, token by token. They land with the left half of V.
struct alignas(128) BlockScales {
  float tokens[kBlockN][kDsMlaBlocks];
};
struct RowsStorage : SharedStorage {
  /// fp8_ds_mla: powers of two that keys and values of a KV tile have been divided by, so that float16 holds them.
  float units[RowsLayout::kStages];
  BlockScales block_scales[RowsLayout::kStages];
};

/// The same where operands are swapped: tokens are rows of MMAs, so a packed row is spread over all warps.
struct SwapAbStorage : SharedStorage {
  struct TileStats {
    float2 rows[kSwapAbRows];  ///< row_max, the factor of what was accumulated before: set if `rescales`
    uint32_t rescales;         ///< whether any row_max may have changed
  };
  /// KV tile i has P, stats and barrier i % kStages: the stage of the KV tile kStages before it has been released.
  TileStats swap_ab_stats[kMaxStages];
  uint64_t swap_ab_p_full[kMaxStages];                       ///< both are written
  float tile_max[kConsumers][kWarpgroupWarps][kSwapAbRows];  ///< the warps' largest scores
  /// Of a work tile: row sums of those warps that have computed P, row_max where these do nothing else.
  float warp_row_sum[kWorkTileSlots][kConsumers * kWarpgroupWarps][kSwapAbRows];
  float row_max[kWorkTileSlots][kSwapAbRows];
  uint64_t swap_ab_row_sum_full[kWorkTileSlots];
};
/// ... and keys are rows of fp8_ds_mla.
struct SwapAbDsMlaStorage : SwapAbStorage {
  BlockScales block_scales[kMaxStages];
  /// Of a KV tile, in v_unit: by the block and the token that is a row of MMAs.
  __half v_scales[kMaxStages][kDsMlaBlocks][kBlockN];
  float tile_scale[kWarpgroupWarps];  ///< the warps' largest block scales
  float v_unit[kWorkTileSlots];       ///< of a work tile: see SwapAbConsumer::v_unit_
};

/// What an instantiation is for. `kDequantizes`: q, keys or values may be fp8, which the producer dequantizes. `kFp8`:
/// all keys and values are fp8 and stay so in the KV pipeline; only where operands are swapped. `kDsMla`: all keys and
/// values are rows of fp8_ds_mla. Latents are multiplied as float16, RoPE parts as bfloat16.
template <typename Element, int32_t DimQk, int32_t BlockM, bool Dequantizes, Fp8 Kind, bool DsMla = false>
struct Traits {
  using T = Element;  ///< of MMAs
  static constexpr int32_t kDimQk = DimQk;
  static constexpr bool kHasRope = DimQk > kHeadDimV;
  static constexpr int32_t kBlockM = BlockM;
  static constexpr bool kSwapsAb = swaps_ab(BlockM);
  static constexpr bool kDequantizes = Dequantizes;
  /// Whether keys and values may be rows of fp8_ds_mla.
  static constexpr bool kTakesDsMla = DsMla || (Dequantizes && kHasRope && std::is_same_v<Element, __nv_bfloat16>);
  static constexpr Fp8 kFp8 = Kind;
  static constexpr bool kDsMla = DsMla;
  using L = Layout<BlockM, element_bytes(Kind)>;
  using Storage =
      std::conditional_t<kSwapsAb, std::conditional_t<DsMla, SwapAbDsMlaStorage, SwapAbStorage>, RowsStorage>;
  /// Where consumers dequantize, a warpgroup of its own computes P and the others only multiply it by V.
  static constexpr bool kSplitsRoles = Kind != Fp8::kNone;
  static constexpr int32_t kThreads = kWarpgroupThreads * (1 + kConsumers + (kSplitsRoles ? 1 : 0));
  /// Registers per thread until warpgroups get shares of their own. With 128 and three warpgroups, a CTA of the combine
  /// fits beside the kernel's and waits there.
  static constexpr int32_t kRegisters = kSwapsAb ? 128 : 168;
  static constexpr int32_t kConsumerRegisters = kSplitsRoles ? 128 : (kSwapsAb ? 152 : (Dequantizes ? 208 : 216));
  static constexpr int32_t kScoresRegisters = kSplitsRoles ? (DsMla ? 184 : 176) : 0;
  static constexpr int32_t kProducerRegisters =
      kThreads / kWarpgroupThreads * kRegisters - kConsumers * kConsumerRegisters - kScoresRegisters;
  static_assert(kSwapsAb ? !Dequantizes : Kind == Fp8::kNone);
  static_assert(!DsMla || (kHasRope && std::is_same_v<Element, __half>));
  static_assert(!DsMla || (kSwapsAb ? Kind == Fp8::kE4M3 : Dequantizes));
};

/// Bytes of a token's block scales, and where those of a token of a KV tile are.
constexpr int32_t kTokenScaleBytes = sizeof(BlockScales::tokens[0]);
template <typename Traits>
__device__ __forceinline__ uint32_t block_scales_of(typename Traits::Storage& storage, uint32_t stage, int32_t token) {
  if constexpr (Traits::kTakesDsMla) {
    return ptx::shared_address(storage.block_scales) +
           (stage * kBlockN + static_cast<uint32_t>(token)) * static_cast<uint32_t>(kTokenScaleBytes);
  } else {
    return 0;
  }
}

/// Bytes of dynamic shared memory, including what aligns it to 1024.
template <typename Traits>
constexpr int32_t smem_bytes() {
  constexpr int32_t kBytes = 1024 + Traits::L::kStorageOffset + static_cast<int32_t>(sizeof(typename Traits::Storage));
  static_assert(kBytes <= kMaxSmemBytes && Traits::L::kStorageOffset % alignof(typename Traits::Storage) == 0);
  return kBytes;
}

/// Arrivals of a phase. Every thread that has read or written shared memory arrives for itself, even where its warp has
/// synchronised before: racecheck and synccheck follow no other order. One lane arrives for its warp's TMA loads and
/// MMAs.
///  - kv_full, work_tile_full: two of each producer thread, one of them when its cp.async are complete.
///  - kv_empty of a half of V: the threads of the consumer that multiplies it.
///  - kv_empty of the RoPE part: all consumer threads, which read P there.
constexpr uint32_t kLaneArrivals = 2;
constexpr uint32_t kFullArrivals = kLaneArrivals * kWarpgroupThreads;
constexpr uint32_t kLandedArrivals = 2 * kFullArrivals;  ///< of both halves of V
constexpr uint32_t kFp8LandedArrivals = 32;

/// Stage and phase parity of a tile in the KV pipeline: CUTLASS's PipelineState.
struct PipelineState {
  uint32_t stage;
  uint32_t parity;
};
template <typename L>
__device__ __forceinline__ PipelineState pipeline_state(uint32_t number) {
  return {number % L::kStages, number / L::kStages & 1};
}

/// The KV tiles of a work tile. Tile 0 is the last along the sequence.
struct KvTiles {
  int32_t last;
  int32_t count;
  int32_t kv_begin;  ///< local tokens
  int32_t kv_end;
  __device__ __forceinline__ int32_t first_token(int32_t i) const { return (last - i) * kBlockN; }
};

/// What decides whether V of a KV tile is zeroed in part or scanned before it is committed.
struct Boundary {
  VisibleRange visible;
  bool custom_mask;
  /// Whether V may have NaN or Inf that some rows see and others do not.
  __device__ __forceinline__ bool needs_scan(int32_t first) const {
    return custom_mask || is_mixed(visible, first, kBlockN);
  }
  __device__ __forceinline__ bool has(int32_t first) const {
    return needs_scan(first) || has_invisible(visible, first, kBlockN);
  }
};

/// Byte offset of a part's barrier in kv_full and kv_empty.
__device__ __forceinline__ uint32_t kv_barrier_offset(const PipelineState& at, int32_t part) {
  return 8 * (at.stage * kKvParts + static_cast<uint32_t>(part));
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
