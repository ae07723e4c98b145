#pragma once

#include "kernels/cuda/sm90/common/copy.cuh"
#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/common/tile_scheduler.cuh"
#include "kernels/cuda/sm90/mla/edge_values.cuh"
#include "ptx/control.cuh"
#include "ptx/tma.cuh"
#include "scheduler/partition_rule.hpp"

/// The loading warpgroup: takes items, finds out what their rows see, and brings queries, keys and values to shared
/// memory, as far ahead of the math warpgroups as the ring has room.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// A tile on its way: its place in the ring and what is done when it has landed.
struct TileLoad {
  Place place;
  int32_t first;  ///< local token
  bool values;    ///< to be multiplied with weights
};

template <typename T>
class Loader {
 public:
  __device__ __forceinline__ Loader(const MlaParams& params, unsigned char* memory, SharedState& state)
      : params_(params),
        state_(state),
        memory_(ptx::shared_address(memory)),
        full_(ptx::shared_address(state.full)),
        empty_(ptx::shared_address(state.empty)),
        landed_(ptx::shared_address(state.landed)),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    const scheduler::PlanView& plan = params_.attention.plan->view;
    const DynamicTileScheduler queue(plan, params_.attention.tile_counters);
    int32_t next = queue.initial_work_tile();  // the first warp's
    for (;; ++num_items_) {
      const int32_t slot = num_items_ % kItems;
      const int32_t use = num_items_ / kItems;
      if (use > 0) ptx::mbarrier_wait(ptx::shared_address(state_.item_empty) + 8 * slot, (use - 1) & 1);
      if (threadIdx.x == 0) state_.next = next;
      ptx::named_barrier_sync(kLoadMeeting, kGroupThreads);
      const int32_t index = state_.next;
      if (index < 0) break;
      const scheduler::WorkTile& item = plan.work_tiles[index];
      if (warp_ == 0) next = queue.next_work_tile(item);
      load_item(plan, item, slot);
    }
    if (threadIdx.x == 0) state_.contexts[num_items_ % kItems].all_done = true;
    hand_over(num_items_ % kItems);
    if (warp_ == 0) queue.finish();
  }

 private:
  __device__ __forceinline__ void load_item(const scheduler::PlanView& plan, const scheduler::WorkTile& item,
                                            int32_t slot) {
    const AttentionParams& params = params_.attention;
    const bool has_keys = item.kv_begin < item.kv_end;
    const bool custom =
        has_keys && params.mask == MaskKind::kCustom && plan.segments[item.segment].mask == SegmentMask::kAsConfig;
    const int32_t num_rows = item.row_end - item.row_begin;
    const int64_t query = bind_row(plan, item, num_rows, has_keys, custom, state_.rows[slot]);
    if (num_items_ > 0) ptx::mbarrier_wait(ptx::shared_address(&state_.queries_empty), (num_items_ - 1) & 1);
    copy_queries(query);
    ptx::named_barrier_sync(kLoadMeeting, kGroupThreads);
    Sight sight = state_.sights[0];
    const Sight other = state_.sights[1];
    sight.any_begin = min(sight.any_begin, other.any_begin);
    sight.any_end = max(sight.any_end, other.any_end);
    sight.all_begin = max(sight.all_begin, other.all_begin);
    sight.all_end = min(sight.all_end, other.all_end);
    const int32_t first_tile = has_keys ? item.kv_begin / kTokens : 0;
    const int32_t num_tiles = has_keys ? (item.kv_end + kTokens - 1) / kTokens - first_tile : 0;
    const SegmentCopy& copy = params_.copies[item.segment];
    if (threadIdx.x == 0) {
      ItemContext& context = state_.contexts[slot];
      context.item = item;
      context.sight = sight;
      context.num_rows = num_rows;
      context.last_tile = first_tile + num_tiles - 1;
      context.num_tiles = num_tiles;
      context.custom = custom;
      context.turned = state_.turned[0] || state_.turned[1];
      context.inside = copy.inside;
      context.by_threads = has_keys && copy.box == 0;
      context.all_done = false;
      if (has_keys) {
        context.shard = plan.segments[item.segment].shard;
        context.first_pos = plan.segments[item.segment].first_pos[item.kv_row];
      }
    }
    hand_over(slot);
    if (num_tiles == 0) return;
    const Tiles tiles{first_tile + num_tiles - 1, num_tiles, sight, custom};
    const SegmentParams& segment = params.segments[item.segment];
    const int32_t* const pages =
        !segment.paged
            ? nullptr
            : segment.indices + (segment.indptr != nullptr ? int64_t{segment.indptr[item.kv_row]}
                                                           : item.kv_row * segment.row_stride + segment.first_column);
    if (copy.box == 0) {
      load_by_threads(tiles, segment, copy, pages, item);
    } else {
      load_boxes(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    }
  }

  /// The row of this thread, and of that 64 further: what it sees, to shared memory, by one of them. Returns where its
  /// query begins, -1 for a row that the item has not.
  __device__ __forceinline__ int64_t bind_row(const scheduler::PlanView& plan, const scheduler::WorkTile& item,
                                              int32_t num_rows, bool has_keys, bool custom, RowInfo& rows) const {
    const int32_t row = static_cast<int32_t>(threadIdx.x) % kRows;
    const bool writes = threadIdx.x < kRows;
    const AttentionParams& params = params_.attention;
    Sight sight{INT32_MAX, 0, 0, INT32_MAX};
    int64_t query = -1;
    int32_t begin = 0;
    int32_t end = 0;
    bool turned = false;
    if (row < num_rows) {
      const int32_t group_size = params.num_q_heads / params.num_kv_heads;
      const int32_t packed = item.row_begin + row;
      const int32_t token = packed / group_size;
      const int32_t q_head = item.kv_head * group_size + (packed - token * group_size);
      query = token * params.q_token_stride + q_head * params.q_head_stride;
      float scale = 0.0f;
      float v_scale = 1.0f;
      if (has_keys) {
        const scheduler::SegmentLengths& lengths = plan.segments[item.segment];
        const SegmentParams& segment = params.segments[item.segment];
        int32_t request = item.request;
        while (plan.cu_q[request + 1] <= token) ++request;
        const int32_t number = token - plan.cu_q[request];
        const int64_t position = int64_t{plan.q_first_pos[request]} + number;
        const scheduler::MaskBounds mask_bounds =
            scheduler::mask_bounds(params.mask, lengths.mask, params.window_left, params.window_right);
        const scheduler::TokenRange range = scheduler::visible_range(
            {lengths.first_pos[item.kv_row], lengths.kv_len[item.kv_row], lengths.shard}, mask_bounds, position);
        begin = static_cast<int32_t>(range.begin < item.kv_begin ? item.kv_begin : range.begin);
        end = static_cast<int32_t>(range.end > item.kv_end ? item.kv_end : range.end);
        if (begin >= end) begin = end = 0;
        if (writes) {
          rows.position[row] = static_cast<int32_t>(position);
          rows.mask_begin[row] = INT32_MAX;
        }
        if (writes && custom) {
          const int32_t mask_begin = plan.mask_first_column[request] - lengths.key_offset[request];
          rows.mask_begin[row] = mask_begin;
          rows.mask_bit[row] =
              8 * plan.mask_byte_indptr[request] + int64_t{number} * plan.mask_columns[request] - mask_begin;
        }
        scale = __fmul_rn(__fmul_rn(scale_at(params.q_scale, request, item.kv_head),
                                    scale_at(segment.k_scale, request, item.kv_head)),
                          params.sm_scale);
        if (!has_bias(params)) scale = __fmul_rn(scale, kLog2E);
        v_scale = scale_at(segment.v_scale, request, item.kv_head);
      }
      if (writes) {
        rows.token[row] = token;
        rows.q_head[row] = q_head;
        rows.scale[row] = scale;
        rows.v_scale[row] = v_scale;
      }
      turned = !(scale > 0.0f);
      if (begin < end) {
        sight.any_begin = begin;
        sight.any_end = end;
      }
      sight.all_begin = begin;
      sight.all_end = end;
    }
    if (writes) {
      rows.visible_begin[row] = begin;
      rows.visible_end[row] = end;
    }
    sight.any_begin = __reduce_min_sync(kAllLanes, sight.any_begin);
    sight.any_end = __reduce_max_sync(kAllLanes, sight.any_end);
    sight.all_begin = __reduce_max_sync(kAllLanes, sight.all_begin);
    sight.all_end = __reduce_min_sync(kAllLanes, sight.all_end);
    turned = __any_sync(kAllLanes, turned);
    if (lane_ == 0 && warp_ < 2) {
      state_.sights[warp_] = sight;
      state_.turned[warp_] = turned;
    }
    return query;
  }

  /// Two warps have the same 32 rows and half of their pieces each; a lane knows where its row's begin. Zeros for rows
  /// that the item has not.
  __device__ __forceinline__ void copy_queries(int64_t query) const {
    constexpr int32_t kPieces = kDimQk / kPiece / 2;
    const int32_t first_row = warp_ % 2 * 32;
    const int32_t first_piece = warp_ / 2 * kPieces;
    const AttentionParams& params = params_.attention;
#pragma unroll 2
    for (int32_t i = lane_; i < 32 * kPieces; i += 32) {
      const int64_t at = __shfl_sync(kAllLanes, query, i / kPieces);
      const int32_t piece = first_piece + i % kPieces;
      const uint32_t target = memory_ + static_cast<uint32_t>(kQueries + tile_offset(first_row + i / kPieces, piece));
      const int64_t from = at < 0 ? 0 : at + piece * kPiece;
      if (params.q_wide) {
        ptx::cp_async_16(target, static_cast<const T*>(params.q) + from, at >= 0);
      } else {
        copy_upcast_16B<T>(target, params.q, params.q_dtype, from, at >= 0);
      }
    }
  }

  /// What this thread has written of an item and its queries.
  __device__ __forceinline__ void hand_over(int32_t slot) const {
    const uint32_t barrier = ptx::shared_address(state_.item_full) + 8 * static_cast<uint32_t>(slot);
    ptx::cp_async_mbarrier_arrive(barrier);
    ptx::mbarrier_arrive(barrier);
  }

  /// An item's tiles, which are loaded from the last to the first.
  struct Tiles {
    int32_t last;
    int32_t count;
    Sight sight;
    bool custom;
    __device__ __forceinline__ int32_t first_token(int32_t i) const { return (last - i) * kTokens; }
    /// Whether values may hold what some rows must not meet.
    __device__ __forceinline__ bool is_looked_at(int32_t first) const { return custom || is_mixed(sight, first); }
    __device__ __forceinline__ bool is_edge(int32_t first) const {
      return is_looked_at(first) || has_unseen(sight, first);
    }
  };

  __device__ __forceinline__ uint32_t tile_address(const Place& place) const {
    return memory_ + place.stage * static_cast<uint32_t>(kTileBytes);
  }
  static __device__ __forceinline__ uint32_t number_of(const Place& place, int32_t part) {
    return 8 * (place.stage * kParts + static_cast<uint32_t>(part));
  }
  __device__ __forceinline__ void await_empty(const Place& place, int32_t part) const {
    ptx::mbarrier_wait(empty_ + number_of(place, part),
                       place.parity ^ 1);  // of a stage never used, the phase before the first
  }                                        // counts as ended

  /// Pages of at least eight tokens, as boxes. Each lane looks up one box of the tiles to come.
  __device__ __forceinline__ void load_boxes(const Tiles& tiles, const MlaParams::Maps& maps, const SegmentCopy& copy,
                                             const int32_t* pages, int32_t head) {
    const int32_t at_once = 32 >> copy.log_boxes;
    const uint64_t policy = ptx::evict_first_policy();
    TokenPlace next = find_box(tiles, 0, copy, pages);
    TokenPlace here = next;
    TileLoad first{};
    bool pending = false;
    const auto load = [&](const CUtensorMap& map, bool keys, bool values, int32_t i) {
      const TileLoad tile{place_of(num_tiles_++), tiles.first_token(i), values};
      const bool edge = values && tiles.is_edge(tile.first);
      const bool mine = lane_ >> copy.log_boxes == i % at_once && here.in_page >= 0;
      issue_boxes(tile, map, tiles.sight, copy, keys, edge, mine, here, head, policy);
      if (pending) look(tiles, first);
      // The second tile is begun before the first is looked at. Later ones would wait for a stage whose tile math
      // warpgroups have done with only when they have had the one to be looked at.
      pending = edge && keys && i == 0 && tiles.count > 1;
      if (pending) {
        first = tile;
      } else if (edge) {
        look(tiles, tile);
      }
    };
#pragma unroll 1
    for (int32_t i = 0; i < tiles.count; ++i) {
      if (i % at_once == 0) {
        here = next;
        next = find_box(tiles, i + at_once, copy, pages);  // on its way until it is needed
      }
      load(maps.k, true, copy.inside, i);
      if (!copy.inside) load(maps.v, false, true, i);
    }
  }

  /// The lane's, of the boxes from tile `i` on. in_page is negative where no row sees any of its tokens.
  __device__ __forceinline__ TokenPlace find_box(const Tiles& tiles, int32_t i, const SegmentCopy& copy,
                                                 const int32_t* pages) const {
    const int32_t in_tile = (lane_ & ((1 << copy.log_boxes) - 1)) * copy.box;
    const int32_t token = tiles.first_token(i + (lane_ >> copy.log_boxes)) + in_tile;
    if (token + copy.box <= tiles.sight.any_begin || token >= tiles.sight.any_end) return {0, -1};
    const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(token));
    const uint32_t in_page = static_cast<uint32_t>(token) - column * copy.page_size.divisor();
    return {pages[column], static_cast<int32_t>(in_page)};
  }

  /// Begins the copies of the warp's columns of a tile: one of each half, and a quarter of the tail's boxes. Lanes that
  /// have a box (`mine`) issue it. Their bytes, and the warp's arrivals, at the parts' barriers.
  __device__ __forceinline__ void issue_boxes(const TileLoad& tile, const CUtensorMap& map, const Sight& sight,
                                              const SegmentCopy& copy, bool keys, bool edge, bool mine,
                                              const TokenPlace& at, int32_t head, uint64_t policy) const {
    const BoxRange boxes = seen_boxes(sight, tile.first, copy.box);
    const int32_t bytes = copy.box * 128;
    const int32_t box = lane_ & ((1 << copy.log_boxes) - 1);
    const uint32_t to = tile_address(tile.place) + static_cast<uint32_t>(box * bytes);
#pragma unroll
    for (int32_t part = 0; part < kParts; ++part) {
      const bool tail = part == kTail;
      const int32_t column = tail ? kValueColumns : part_begin(part) + warp_;
      const int32_t count = tail ? (keys ? boxes.count_of(warp_) : 0) : boxes.end - boxes.begin;
      const uint32_t barrier = edge && !tail ? landed_ + 8 * tile.place.stage : full_ + number_of(tile.place, part);
      await_empty(tile.place, part);
      if (lane_ == 0) {
        ptx::mbarrier_arrive(barrier, kIssueArrivals);
        ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(count * bytes));
      }
      __syncwarp();
      if (mine && (!tail || (keys && box % kGroupWarps == warp_))) {
        ptx::tma_load_5d(to + static_cast<uint32_t>(column * kColumnBytes), &map, barrier, 0, at.in_page, column, head,
                         at.page, policy);
      }
    }
  }

  /// Values that are on their way, before they are handed over.
  __device__ __forceinline__ void look(const Tiles& tiles, const TileLoad& tile) {
    const uint32_t bit = 1u << tile.place.stage;
    ptx::mbarrier_wait(landed_ + 8 * tile.place.stage, (landed_phases_ & bit) != 0 ? 1 : 0);
    landed_phases_ ^= bit;
    look_through_values(tiles, tile);
  }
  __device__ __forceinline__ void look_through_values(const Tiles& tiles, const TileLoad& tile) const {
    const bool special =
        look_through<T>(tile_address(tile.place), tiles.sight.any_begin - tile.first, tiles.sight.any_end - tile.first,
                        tiles.is_looked_at(tile.first), static_cast<int32_t>(threadIdx.x));
    const bool any = __any_sync(kAllLanes, special);
    if (lane_ == 0) state_.special[tile.place.stage][warp_] = any ? 1 : 0;
    hand_over_part(tile.place, kLeft);
    hand_over_part(tile.place, kRight);
  }

  /// A part that this thread has written to, or looked at.
  __device__ __forceinline__ void hand_over_part(const Place& place, int32_t part) const {
    ptx::fence_view_async_shared();
    ptx::mbarrier_arrive(full_ + number_of(place, part), kLaneArrivals);
  }

  /// Any other keys and values.
  __device__ __forceinline__ void load_by_threads(const Tiles& tiles, const SegmentParams& segment,
                                                  const SegmentCopy& copy, const int32_t* pages,
                                                  const scheduler::WorkTile& item) {
    const int32_t first_token = segment.paged ? 0 : segment.indptr[item.kv_row];
#pragma unroll 1
    for (int32_t i = 0; i < tiles.count; ++i) {
      load_tile(tiles, i, {segment.k, segment.dtype, segment.k_strides}, true, copy.inside, item.kv_head, copy, pages,
                first_token);
      if (copy.inside) continue;
      load_tile(tiles, i, {segment.v, segment.dtype, segment.v_strides}, false, true, item.kv_head, copy, pages,
                first_token);
    }
  }

  struct Source {
    const void* data;
    DType dtype;
    const KvStrides& strides;
  };

  /// A warp has 16 tokens of the tile, each lane knows where one of them lies. Zeros for tokens that no row sees.
  __device__ __forceinline__ void load_tile(const Tiles& tiles, int32_t i, const Source& source, bool keys, bool values,
                                            int32_t head, const SegmentCopy& copy, const int32_t* pages,
                                            int32_t first_token) {
    const TileLoad tile{place_of(num_tiles_++), tiles.first_token(i), values};
    const int32_t mine = tile.first + warp_ * 16 + lane_ % 16;
    int64_t begin = -1;
    if (mine >= tiles.sight.any_begin && mine < tiles.sight.any_end) {
      begin = head * source.strides.head;
      if (pages == nullptr) {
        begin += (int64_t{first_token} + mine) * source.strides.token;
      } else {
        const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(mine));
        const uint32_t in_page = static_cast<uint32_t>(mine) - column * copy.page_size.divisor();
        begin += pages[column] * source.strides.page + in_page * source.strides.token;
      }
    }
    const bool looked_at = values && tiles.is_looked_at(tile.first);
#pragma unroll 1
    for (int32_t part = 0; part < kParts; ++part) {
      await_empty(tile.place, part);
      if (part != kTail || keys) copy_part(tile, part, source, begin, copy.direct);
      if (looked_at && part != kTail) continue;
      end_copies(tile.place, part, copy.direct);
    }
    if (!looked_at) return;
    ptx::cp_async_wait_all();
    ptx::named_barrier_sync(kLoadMeeting, kGroupThreads);  // pieces are looked through by other threads
    look_through_values(tiles, tile);
  }

  __device__ __forceinline__ void copy_part(const TileLoad& tile, int32_t part, const Source& source, int64_t begin,
                                            bool direct) const {
    const int32_t pieces = 8 * part_columns(part);  // 8 or 32: a power of two
    const int32_t log_pieces = part == kTail ? 3 : 5;
#pragma unroll 2
    for (int32_t n = lane_; n < 16 * pieces; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n >> log_pieces);
      const int32_t piece = 8 * part_begin(part) + (n & (pieces - 1));
      const uint32_t target =
          tile_address(tile.place) + static_cast<uint32_t>(tile_offset(16 * warp_ + (n >> log_pieces), piece));
      const int64_t from = at < 0 ? 0 : at + piece * kPiece;
      if (direct) {
        ptx::cp_async_16(target, static_cast<const T*>(source.data) + from, at >= 0);
      } else {
        copy_upcast_16B<T>(target, source.data, source.dtype, from, at >= 0);
      }
    }
  }

  /// The part is there when this thread's copies are through.
  __device__ __forceinline__ void end_copies(const Place& place, int32_t part, bool direct) const {
    if (!direct) {
      hand_over_part(place, part);
      return;
    }
    ptx::cp_async_mbarrier_arrive(full_ + number_of(place, part));
    ptx::mbarrier_arrive(full_ + number_of(place, part));
  }

  const MlaParams& params_;
  SharedState& state_;
  const uint32_t memory_;
  const uint32_t full_;
  const uint32_t empty_;
  const uint32_t landed_;
  const int32_t warp_;
  const int32_t lane_;
  int32_t num_items_ = 0;
  uint32_t num_tiles_ = 0;  ///< in the ring, so far
  uint32_t landed_phases_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
