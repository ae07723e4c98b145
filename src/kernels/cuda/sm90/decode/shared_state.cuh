#pragma once

#include "kernels/cuda/common/row_state.cuh"
#include "kernels/cuda/sm90/common/config.hpp"
#include "kernels/cuda/sm90/decode/params.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

/// What the scheduler's warp tells the math warps, in shared memory.
namespace folio::inline v0::kernels::cuda::sm90::decode {

constexpr uint32_t kAllLanes = 0xffffffffu;

/// What is known of an item and its rows.
struct ItemContext {
  int64_t mask_bit[kMaxRows];    ///< custom mask: local token j stands at bit mask_bit + j of the mask's bytes,
  int32_t mask_begin[kMaxRows];  ///< if j >= mask_begin; earlier tokens are visible
  int32_t position[kMaxRows];
  int32_t visible_begin[kMaxRows];  ///< local tokens; rows beyond the item's see nothing
  int32_t visible_end[kMaxRows];
  float scale[kMaxRows];    ///< of products: to base-2 units, but to natural ones where there is a cap or a bias
  float slope[kMaxRows];    ///< ALiBi's, or 0
  float v_scale[kMaxRows];  ///< of the values
  scheduler::WorkTile item;
  Sight sight;
  KvShard shard;
  int64_t first_pos;
  int32_t num_rows;
  int32_t first;  ///< local token that the first tile begins at: a multiple of kTileTokens
  int32_t box;    ///< kSingles, kSmallBox or kLargeBox
  bool custom;    ///< the custom mask's bits apply
  bool has_keys;  ///< false: the rows see nothing, and the segment is not to be read
};

enum EntryFlags : uint32_t {
  kItemEnds = 1u << 0,  ///< the item's last entry
  kAllDone = 1u << 1,   ///< no entry: the CTA's work is done
};

/// Some tiles of an item: one step of the queue. Tile t is math warp t % math_warps's.
struct Entry {
  int32_t context;    ///< index of the item's context and queries
  int32_t first;      ///< local token of tile 0
  int32_t num_tiles;  ///< up to entry_tiles
  uint32_t flags;     ///< EntryFlags
};

/// Shared memory's part of fixed size. A context is in use until the item's last entry is returned; two entries can be
/// under way, and the second item after one in use cannot begin before that one's last entry has come back.
template <int32_t Warps, int32_t Stages>
struct SharedState {
  static constexpr int32_t kWarps = Warps;
  ItemContext contexts[kEntries];
  Entry entries[kEntries];
  alignas(16) float top[kResultRows][Warps];
  alignas(16) float sum[kResultRows][Warps];
  uint64_t full[kEntries];          ///< phase n: the slot's entry number n is there
  uint64_t empty[kEntries];         ///< phase n: every thread of the math warps has done with it
  uint64_t arrived[Warps][Stages];  ///< phase n: the stage's tile number n is there
};

/// Arrivals of a phase of `full` and `arrived`: two of every lane, one of them when its copies are through.
constexpr uint32_t kLaneArrivals = 64;

/// A row's q head and token.
struct RowPlace {
  int32_t token;
  int32_t q_head;
};
__device__ __forceinline__ RowPlace row_place(const AttentionParams& params, const scheduler::WorkTile& item,
                                              int32_t row) {
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t packed = item.row_begin + row;
  return {packed / group_size, item.kv_head * group_size + packed % group_size};
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
