#pragma once

#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/sm90/prefill/kv_pipeline.cuh"
#include "kernels/cuda/sm90/prefill/launch.hpp"
#include "ptx/wgmma.cuh"

/// Shared memory: what the producer tells the consumers about work tiles, and all barriers.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Named barriers. Those of a consumer warpgroup are two neighbouring ones.
constexpr int32_t kProducerBarrier = 1;
constexpr int32_t kConsumersBarrier = 2;          ///< of both consumer warpgroups
constexpr int32_t kConsumerWarpgroupBarrier = 3;  ///< of one consumer warpgroup
constexpr int32_t kPingPongBarrier = 5;           ///< a consumer warpgroup waits here for its turn to issue MMAs
constexpr int32_t kFetchBarrier = 7;              ///< of the warps that fetch work tiles

/// Scores are multiplied with scales of at least kMinScale: ALiBi slopes can be divided by it. Rows whose scale is less
/// than kMinScaleAsIs go through negate_scores first.
constexpr float kMinScale = 0x1p-100f;
constexpr float kMinScaleAsIs = 0x1p-40f;

/// The rows of a work tile. Rows beyond its last one see nothing.
struct RowInfo {
  int64_t mask_bit[kBlockM];    ///< custom mask: local token j has bit mask_bit + j of the mask's bytes,
  int64_t out[kBlockM];         ///< where the row's output begins, in elements
  int32_t mask_begin[kBlockM];  ///< if j >= mask_begin; earlier tokens are visible
  int32_t position[kBlockM];
  int32_t visible_begin[kBlockM];  ///< local tokens
  int32_t visible_end[kBlockM];
  int32_t token[kBlockM];
  int32_t q_head[kBlockM];
  float scale[kBlockM];    ///< of scores, to base-2 units
  float slope[kBlockM];    ///< of ALiBi, in base-2 units; 0 without
  float v_scale[kBlockM];  ///< of V
};

/// A work tile as a whole.
struct TileContext {
  scheduler::WorkTile work_tile;
  VisibleRange visible;
  KvShard shard;
  int64_t first_pos;
  const int32_t* pages;  ///< of the page table's row, from local token 0 on; null: the segment is ragged
  void* out;
  int32_t num_rows;
  int32_t first_tile;     ///< first KV tile; tile 0 begins with local token 0
  int32_t num_tiles;      ///< KV tiles
  int32_t unmasked_end;   ///< kAlibi: KV tiles that end at or before this token, and that all rows see, need no mask
  bool uses_custom_mask;  ///< the custom mask's bits apply
  int64_t mask_bytes;     ///< of the custom mask
  bool negate_scores;     ///< some row's scale is less than kMinScaleAsIs
  bool by_threads;        ///< K and V are copied by threads
  bool q_by_tma;
  bool fast_epilogue;  ///< see FastEpilogue
  bool out_by_tma;     ///< fast_epilogue: the output is left in Q's memory, and the producer stores it
  bool is_half;        ///< fast_epilogue: the output is float16, not bfloat16
  bool all_done;       ///< there is no work tile: the CTA ends
};

/// The part of shared memory whose size does not depend on the head dimensions.
struct SharedStorage {
  RowInfo rows[kTileBuffers];
  TileContext contexts[kTileBuffers];
  VisibleRange visible_of_warp[kWarpgroupWarps];  ///< of the rows that a fetch warp has bound
  bool negate_scores[kWarpgroupWarps];            ///< likewise
  int32_t unmasked_end[kWarpgroupWarps];          ///< likewise
  int32_t next;       ///< index of the next work tile, from the first fetch thread; -1: none
  uint32_t num_ctas;  ///< CTAs that have work tiles; the first fetch warp's
  /// Of V tiles that some rows see in part: not 0 where a producer warp has found NaN or Inf.
  uint8_t nonfinite[kMaxStages][kWarpgroupWarps];
  uint64_t tile_described[kTileBuffers];  ///< phase n: the warps that load K and V may begin the buffer's work tile n
  uint64_t tile_full[kTileBuffers];       ///< phase n: it is complete, with its Q, and these warps have begun it
  uint64_t tile_empty[kTileBuffers];      ///< phase n: the consumers have released it
  KvPipeline k_pipeline;
  KvPipeline v_pipeline;
  uint64_t v_landed;                        ///< V tiles that the producer scans for NaN and Inf: TMA is complete
  uint64_t fp8_landed[2][kWarpgroupWarps];  ///< TMA has brought a producer warp's fp8 data; FP8 MMA: of a raw V stage
};

/// Where fp8 data lands that is dequantized: a KV tile, behind everything else.
constexpr int32_t kFp8Landing =
    (smem_layout({kFp8RowBytes, kFp8RowBytes}).storage + static_cast<int32_t>(sizeof(SharedStorage)) + 1023) / 1024 *
    1024;

/// Bytes of shared memory, with what it takes to begin at a multiple of 1024. `Dequantizes`: fp8 data.
template <int32_t DimQk, int32_t DimV, bool Dequantizes>
constexpr int32_t smem_bytes() {
  if constexpr (Dequantizes) return 1024 + kFp8Landing + kFp8TileBytes;
  return 1024 + smem_layout({DimQk, DimV}).storage + static_cast<int32_t>(sizeof(SharedStorage));
}

/// By all threads, before anything else. `k_empty_arrivals`: arrivals that release a K stage; `fetch_threads`: of the
/// warps that fetch work tiles.
__device__ __forceinline__ void init_barriers(SharedStorage& storage, uint32_t k_empty_arrivals,
                                              uint32_t fetch_threads) {
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kTileBuffers; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&storage.tile_described[i]), fetch_threads);
      ptx::mbarrier_init(ptx::shared_address(&storage.tile_full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&storage.tile_empty[i]), kConsumerWarps * 32);
    }
    for (int32_t i = 0; i < kMaxStages; ++i) {
      for (uint8_t& flag : storage.nonfinite[i]) flag = 0;  // not all producer warps scan
      ptx::mbarrier_init(ptx::shared_address(&storage.k_pipeline.full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&storage.k_pipeline.empty[i]), k_empty_arrivals);
      ptx::mbarrier_init(ptx::shared_address(&storage.v_pipeline.full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&storage.v_pipeline.empty[i]), kConsumerWarps);
    }
    ptx::mbarrier_init(ptx::shared_address(&storage.v_landed), kFullArrivals);
    for (auto& landed : storage.fp8_landed) {
      for (uint64_t& of_warp : landed) ptx::mbarrier_init(ptx::shared_address(&of_warp), 1);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
