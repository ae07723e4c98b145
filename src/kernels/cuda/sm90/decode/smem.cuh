#pragma once

#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/sm90/common/fp8.cuh"
#include "kernels/cuda/sm90/decode/launch.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

/// What the scheduler warp and the consumer warps share in shared memory, and its barriers.
namespace folio::inline v0::kernels::cuda::sm90::decode {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int32_t kConsumerBarrier = 1;  ///< named barrier of the consumer warps

/// A work tile and its rows. Rows beyond num_rows see no tokens.
struct WorkTileContext {
  int64_t mask_bit[kMaxRows];    ///< custom mask: local token j has bit mask_bit + j of the mask,
  int32_t mask_begin[kMaxRows];  ///< if j >= mask_begin; earlier tokens are visible
  int32_t position[kMaxRows];
  int32_t visible_begin[kMaxRows];  ///< local tokens
  int32_t visible_end[kMaxRows];
  float scale[kMaxRows];  ///< from QK^T to base-2 logits; to natural ones where there is a soft cap or ALiBi
  float slope[kMaxRows];  ///< of ALiBi, or 0
  float v_scale[kMaxRows];
  scheduler::WorkTile work_tile;
  VisibleRange visible;
  KvShard shard;
  int64_t first_pos;
  int32_t num_rows;
  int32_t first;        ///< local token at which the first KV tile begins: a multiple of kTileTokens
  int32_t copy_tokens;  ///< kCpAsync, kTmaHalfTile or kTmaWholeTile
  bool custom;          ///< the custom mask applies
  bool has_keys;        ///< false: no row sees a key, and the segment must not be read
};

enum BatchFlags : uint32_t {
  kLastBatch = 1u << 0,   ///< of its work tile
  kNoMoreWork = 1u << 1,  ///< not a batch: the CTA is done
};

/// Some KV tiles of a work tile: one step of the queue from the scheduler warp to the consumer warps. KV tile t belongs
/// to consumer warp t % consumer_warps.
struct TileBatch {
  int32_t context;    ///< index of the work tile's context and queries
  int32_t first;      ///< local token of KV tile 0
  int32_t num_tiles;  ///< up to batch_tiles
  uint32_t flags;     ///< BatchFlags
};

/// The part of shared memory whose size does not depend on head dimensions. A context stays valid until the consumers
/// have released its last batch. With two stages, the work tile after the next cannot overwrite it before that.
template <int32_t Warps, int32_t Stages>
struct SharedStorage {
  static constexpr int32_t kWarps = Warps;
  WorkTileContext contexts[kBatchStages];
  TileBatch batches[kBatchStages];
  int32_t first_ctas;  ///< see DynamicTileScheduler; the scheduler warp's
  alignas(16) float row_max[kMaxRows][Warps];
  alignas(16) float row_sum[kMaxRows][Warps];
  uint64_t batch_full[kBatchStages];   ///< phase n: batch n of the stage is there, with its places and queries
  uint64_t batch_empty[kBatchStages];  ///< phase n: every consumer thread has released it
  uint64_t reduce_empty;               ///< phase n: every consumer thread has read what it needs of reduction n
  uint64_t kv_full[Warps][Stages];     ///< phase n: KV tile n of the stage is there
};

/// Arrivals of a phase of batch_full and kv_full: two of every lane. One of the two comes when its copies are through.
constexpr uint32_t kLaneArrivals = 64;

/// The token and the query head of row `row` of a work tile.
struct QueryRow {
  int32_t token;
  int32_t q_head;
};
__device__ __forceinline__ QueryRow query_row(const AttentionParams& params, const scheduler::WorkTile& tile,
                                              int32_t row) {
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t packed = tile.row_begin + row;
  return {packed / group_size, tile.kv_head * group_size + packed % group_size};
}

/// O^T accumulators: of the 16 components of one MMA, a lane holds first_component and the one kSecondComponent
/// further. Dequantized values come in another order, see dequantize_values.
template <Fp8 kFp8>
__device__ __forceinline__ int32_t first_component(int32_t lane) {
  return kFp8 == Fp8::kNone ? lane / 4 : lane / 4 * 2;
}
template <Fp8 kFp8>
constexpr int32_t kSecondComponent = kFp8 == Fp8::kNone ? 8 : 1;

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
