#pragma once

#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/sm90/prefill/params.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"

/// What the loading warpgroup tells the math warpgroups, in shared memory.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

constexpr uint32_t kAllLanes = 0xffffffffu;

/// Named barriers.
constexpr int32_t kLoadMeeting = 1;
constexpr int32_t kMathMeeting = 2;   ///< of both math warpgroups
constexpr int32_t kGroupMeeting = 3;  ///< of the first of them; the second's follows
constexpr int32_t kTurns = 5;         ///< at which the first waits for its turn; the second's follows

/// Least scale of scores that weights are made with: slopes can be divided by it. And the least of rows as they come,
/// which are then scaled with kLeastQueries or more.
constexpr float kLeastScale = 0x1p-100f;
constexpr float kUsualScale = 0x1p-40f;
constexpr int32_t kLeastQueries = -60;  ///< a power of two

/// What is known of an item's rows. Rows beyond the item's see nothing.
struct RowInfo {
  int64_t mask_bit[kRows];    ///< custom mask: local token j stands at bit mask_bit + j of the mask's bytes,
  int64_t out[kRows];         ///< where the row's results begin, in elements
  int32_t mask_begin[kRows];  ///< if j >= mask_begin; earlier tokens are visible
  int32_t position[kRows];
  int32_t visible_begin[kRows];  ///< local tokens
  int32_t visible_end[kRows];
  int32_t token[kRows];
  int32_t q_head[kRows];
  float scale[kRows];    ///< of products, to base-2 units
  float slope[kRows];    ///< ALiBi's, in base-2 units; 0 without
  float v_scale[kRows];  ///< of the values
};

/// What is known of a whole item.
struct ItemContext {
  scheduler::WorkTile item;
  Sight sight;
  KvShard shard;
  int64_t first_pos;
  const int32_t* pages;  ///< of the row of the page table, from local token 0 on; null: the segment is ragged
  void* out;
  int32_t num_rows;
  int32_t first_tile;  ///< of local tokens, from local token 0
  int32_t num_tiles;
  int32_t whole_end;  ///< kAlibi: up to which tiles need no mask that all rows see whole
  bool custom;        ///< the custom mask's bits apply
  bool turned;        ///< some row's scale is less than kUsualScale
  bool by_threads;    ///< keys and values are copied by threads
  bool queries_by_boxes;
  bool plain_end;         ///< see PlainEnd
  bool results_by_boxes;  ///< plain_end: results are left in the queries' place, for the loading warpgroup to store
  bool half;              ///< plain_end: results are float16, not bfloat16
  bool all_done;          ///< no item: the CTA's work is done
};

/// Barriers of tiles of keys, or of values.
struct Ring {
  uint64_t full[kMaxStages];   ///< phase n: the stage's tile number n is there
  uint64_t empty[kMaxStages];  ///< phase n: the math warps have done with it
};
/// From a stage's first barrier to its second.
constexpr uint32_t kToEmpty = 8 * kMaxStages;

/// A ring's next stage, and which of its phases is the next to end.
template <int32_t Stages>
struct RingPlace {
  uint32_t stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void step() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Shared memory's part of fixed size.
struct SharedState {
  RowInfo rows[kItems];
  ItemContext contexts[kItems];
  Sight sights[kGroupWarps];  ///< of the loading warps' rows
  bool turned[kGroupWarps];
  int32_t whole_end[kGroupWarps];
  int32_t next;  ///< item, by the thread that claims; -1: none
  /// Of tiles of values at which rows look differently: not 0 where a loading warp has found infinities or NaN.
  uint8_t special[kMaxStages][kGroupWarps];
  uint64_t item_full[kItems];   ///< phase n: the slot's item number n is there, with its queries
  uint64_t item_empty[kItems];  ///< phase n: the math warps have done with it
  Ring keys;
  Ring values;
  uint64_t landed;  ///< of tiles of values that the loading warps look through first
  /// Phase n: a loading warp's codes of the stage's tile number n; of keys and of values.
  uint64_t codes_landed[2][kMaxStages][kGroupWarps];
};

/// Arrivals of a phase: every loading thread's two, one of them when its copies are through. Each lane arrives for
/// itself, even where a warp has met before: racecheck and synccheck follow no other order.
constexpr uint32_t kLaneArrivals = 2;
constexpr uint32_t kFullArrivals = kLaneArrivals * kGroupThreads;

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
