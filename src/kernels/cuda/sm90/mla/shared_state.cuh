#pragma once

#include "kernels/cuda/common/row_state.cuh"
#include "kernels/cuda/sm90/mla/params.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"

/// What the loading warpgroup tells the math warpgroups, and they each other, in shared memory.
namespace folio::inline v0::kernels::cuda::sm90::mla {

constexpr uint32_t kAllLanes = 0xffffffffu;

/// Named barriers.
constexpr int32_t kLoadMeeting = 1;
constexpr int32_t kGroupMeeting = 2;  ///< of the first math warpgroup; the second's follows

/// What is known of an item's rows. Rows beyond the item's see nothing.
struct RowInfo {
  int64_t mask_bit[kRows];    ///< custom mask: local token j stands at bit mask_bit + j of the mask's bytes,
  int32_t mask_begin[kRows];  ///< if j >= mask_begin; earlier tokens are visible
  int32_t position[kRows];
  int32_t visible_begin[kRows];  ///< local tokens
  int32_t visible_end[kRows];
  int32_t token[kRows];
  int32_t q_head[kRows];
  float scale[kRows];    ///< of products: to base-2 units, but to natural ones where there is a cap or a bias
  float v_scale[kRows];  ///< of the values
};

/// What is known of a whole item.
struct ItemContext {
  scheduler::WorkTile item;
  Sight sight;
  KvShard shard;
  int64_t first_pos;
  int32_t num_rows;
  int32_t last_tile;  ///< of kTokens local tokens, from local token 0; tiles are taken from the last to the first
  int32_t num_tiles;
  bool custom;      ///< the custom mask's bits apply
  bool turned;      ///< some row's scale is not positive
  bool inside;      ///< values are inside keys; else a tile of values follows that of its keys in the ring
  bool by_threads;  ///< keys and values are copied by threads
  bool all_done;    ///< no item: the CTA's work is done
};

/// What the math warpgroup that has a tile's scores tells the other: of even and of odd tiles.
struct TileState {
  float top[kRows];     ///< the largest logit so far
  float factor[kRows];  ///< of what has been accumulated before the tile
};

/// Shared memory's part of fixed size.
struct SharedState {
  RowInfo rows[kItems];
  ItemContext contexts[kItems];
  Sight sights[2];  ///< of the rows' halves
  bool turned[2];
  int32_t next;  ///< item, by the warp that claims; -1: none
  TileState tiles[2];
  float sums[kItems][kMathGroups][kRows];  ///< of an item, to be joined
  /// Of tiles at which rows look differently: not 0 where a loading warp has found infinities or NaN.
  uint8_t special[kStages][kGroupWarps];
  uint64_t item_full[kItems];   ///< phase n: the slot's item number n is there, with its queries
  uint64_t item_empty[kItems];  ///< phase n: the math warps have done with it
  uint64_t queries_empty;       ///< phase n: ... with the queries of item n
  uint64_t full[kStages][kParts];
  uint64_t empty[kStages][kParts];
  uint64_t landed[kStages];  ///< values that the loading warps look at before they hand them over
  /// Of a math warp's rows, which a warp of each group has. Of even and odd tiles, phase n, of tile 2n (+ 1): the
  /// TileState is there; the weights are. Phase n: both groups' sums of item n are.
  uint64_t told[2][kGroupWarps];
  uint64_t weighed[2][kGroupWarps];
  uint64_t summed[kGroupWarps];
};

/// Arrivals of a phase: every loading thread's two, one of them when its copies are through; of a half of a tile, the
/// threads of the group that multiplies it; of its tail, all math threads, which read weights there. Who has written or
/// read shared memory arrives for itself, even where its warp has met before: racecheck and synccheck follow no other
/// order. One lane arrives for its warp's boxes and products.
constexpr uint32_t kLaneArrivals = 2;
constexpr uint32_t kFullArrivals = kLaneArrivals * kGroupThreads;
constexpr uint32_t kLandedArrivals = 2 * kFullArrivals;  ///< of both halves
/// Those of a warp whose one lane issues boxes, but for the one that brings the bytes.
constexpr uint32_t kIssueArrivals = kLaneArrivals * 32 - 1;
constexpr uint32_t kHalfArrivals = kGroupThreads;
constexpr uint32_t kMathThreads = kMathGroups * kGroupThreads;

/// A place in the ring: tiles take its stages in turn.
struct Place {
  uint32_t stage;
  uint32_t parity;
};
__device__ __forceinline__ Place place_of(uint32_t number) {
  return {number % kStages, number / kStages & 1};
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
