#pragma once

#include "kernels/cuda/sm90/decode/copies.cuh"
#include "kernels/cuda/sm90/decode/item_queue.cuh"
#include "kernels/cuda/sm90/prefill/edge_values.cuh"
#include "planner/partition_rule.hpp"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

/// The loading warpgroup: takes items, finds out what their rows see, and brings queries, keys and values to shared
/// memory, as far ahead of the math warpgroups as the ring has room.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

template <typename T, int32_t DimQk, int32_t DimV>
class Loader {
  static constexpr HeadDims kDims{DimQk, DimV};
  static constexpr SharedLayout kLayout = shared_layout(kDims);

 public:
  __device__ __forceinline__ Loader(const PrefillParams& params, unsigned char* memory, SharedState& state)
      : params_(params),
        state_(state),
        memory_(ptx::shared_address(memory)),
        full_(ptx::shared_address(state.full)),
        empty_(ptx::shared_address(state.empty)),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    const planner::PlanView& plan = params_.attention.plan->view;
    const ItemQueue queue(plan, params_.attention.claim_counters);
    int32_t next = queue.first();  // the first thread's
    for (;; ++num_items_) {
      const int32_t slot = num_items_ % kItems;
      const int32_t use = num_items_ / kItems;
      if (use > 0) ptx::wait(ptx::shared_address(state_.item_empty) + 8 * slot, (use - 1) & 1);
      if (threadIdx.x == 0) state_.next = next;
      ptx::meet(kLoadMeeting, kGroupThreads);
      const int32_t index = state_.next;
      if (index < 0) break;
      const planner::WorkItem& item = plan.items[index];
      if (threadIdx.x == 0) next = next_of(plan, item);
      load_item(plan, item, slot);
    }
    if (threadIdx.x == 0) state_.contexts[num_items_ % kItems].all_done = true;
    hand_over(num_items_ % kItems);
    if (warp_ == 0) queue.finish();
  }

 private:
  /// Index of the item after `item`: of the same accumulation, or the next claim's; -1: none. By one thread.
  __device__ __forceinline__ int32_t next_of(const planner::PlanView& plan, const planner::WorkItem& item) const {
    if ((item.flags & planner::kFinish) == 0) return item.partial;
    const uint32_t claim = static_cast<uint32_t>(plan.num_workers) + atomicAdd(params_.attention.claim_counters, 1u);
    return claim < static_cast<uint32_t>(plan.num_claims) ? static_cast<int32_t>(claim) : -1;
  }

  __device__ __forceinline__ void load_item(const planner::PlanView& plan, const planner::WorkItem& item,
                                            int32_t slot) {
    const AttentionParams& params = params_.attention;
    const bool has_keys = item.kv_begin < item.kv_end;
    const bool custom =
        has_keys && params.mask == MaskKind::kCustom && plan.segments[item.segment].mask == SegmentMask::kAsConfig;
    const int32_t num_rows = item.row_end - item.row_begin;
    bind_row(plan, item, num_rows, has_keys, custom, state_.rows[slot], slot);
    ptx::meet(kLoadMeeting, kGroupThreads);
    Sight sight = state_.sights[0];
#pragma unroll
    for (int32_t w = 1; w < kGroupWarps; ++w) {
      const Sight other = state_.sights[w];
      sight.any_begin = min(sight.any_begin, other.any_begin);
      sight.any_end = max(sight.any_end, other.any_end);
      sight.all_begin = max(sight.all_begin, other.all_begin);
      sight.all_end = min(sight.all_end, other.all_end);
    }
    const int32_t first_tile = has_keys ? item.kv_begin / kTokens : 0;
    const int32_t num_tiles = has_keys ? (item.kv_end + kTokens - 1) / kTokens - first_tile : 0;
    const SegmentCopy& copy = params_.copies[item.segment];
    if (threadIdx.x == 0) {
      ItemContext& context = state_.contexts[slot];
      context.item = item;
      context.sight = sight;
      context.num_rows = num_rows;
      context.first_tile = first_tile;
      context.num_tiles = num_tiles;
      context.custom = custom;
      context.turned = state_.turned[0] || state_.turned[1] || state_.turned[2] || state_.turned[3];
      context.by_threads = has_keys && copy.box == 0;
      context.all_done = false;
      if (has_keys) {
        context.shard = plan.segments[item.segment].shard;
        context.first_pos = plan.segments[item.segment].first_pos[item.kv_row];
      }
    }
    hand_over(slot);
    if (num_tiles == 0) return;
    const Tiles tiles(first_tile + num_tiles - 1, num_tiles, sight, custom);
    const SegmentParams& segment = params.segments[item.segment];
    const int32_t* const pages =
        !segment.paged
            ? nullptr
            : segment.indices + (segment.indptr != nullptr ? int64_t{segment.indptr[item.kv_row]}
                                                           : item.kv_row * segment.row_stride + segment.first_column);
    if (copy.box == 0) {
      load_by_threads(tiles, segment, copy, pages, item);
    } else if (boxes_per_warp(copy.box) == 1) {
      load_boxes<1>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    } else if (boxes_per_warp(copy.box) == 2) {
      load_boxes<2>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    } else {
      load_boxes<4>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    }
  }

  /// This thread's row: what it sees, to shared memory; its warp's queries to theirs.
  __device__ __forceinline__ void bind_row(const planner::PlanView& plan, const planner::WorkItem& item,
                                           int32_t num_rows, bool has_keys, bool custom, RowInfo& rows,
                                           int32_t slot) const {
    const int32_t thread = 32 * warp_ + lane_;
    const AttentionParams& params = params_.attention;
    Sight sight{INT32_MAX, 0, 0, INT32_MAX};
    int64_t query = -1;
    int32_t begin = 0;
    int32_t end = 0;
    bool turned = false;
    if (thread < num_rows) {
      const int32_t group_size = params.num_q_heads / params.num_kv_heads;
      const int32_t packed = item.row_begin + thread;
      const int32_t token = packed / group_size;
      const int32_t q_head = item.kv_head * group_size + (packed - token * group_size);
      query = token * params.q_token_stride + q_head * params.q_head_stride;
      rows.token[thread] = token;
      rows.q_head[thread] = q_head;
      float scale = 0.0f;
      float v_scale = 1.0f;
      if (has_keys) {
        const planner::SegmentLengths& lengths = plan.segments[item.segment];
        const SegmentParams& segment = params.segments[item.segment];
        int32_t request = item.request;
        while (plan.cu_q[request + 1] <= token) ++request;
        const int32_t number = token - plan.cu_q[request];
        const int64_t position = int64_t{plan.q_first_pos[request]} + number;
        const planner::KeySight key_sight =
            planner::key_sight(params.mask, lengths.mask, params.window_left, params.window_right);
        const planner::TokenRange range = planner::visible_range(
            {lengths.first_pos[item.kv_row], lengths.kv_len[item.kv_row], lengths.shard}, key_sight, position);
        begin = static_cast<int32_t>(range.begin < item.kv_begin ? item.kv_begin : range.begin);
        end = static_cast<int32_t>(range.end > item.kv_end ? item.kv_end : range.end);
        if (begin >= end) begin = end = 0;
        rows.position[thread] = static_cast<int32_t>(position);
        rows.mask_begin[thread] = INT32_MAX;
        if (custom) {
          const int32_t mask_begin = plan.mask_first_column[request] - lengths.key_offset[request];
          rows.mask_begin[thread] = mask_begin;
          rows.mask_bit[thread] =
              8 * plan.mask_byte_indptr[request] + int64_t{number} * plan.mask_columns[request] - mask_begin;
        }
        scale = __fmul_rn(__fmul_rn(scale_at(params.q_scale, request, item.kv_head),
                                    scale_at(segment.k_scale, request, item.kv_head)),
                          params.sm_scale);
        if (!has_bias(params)) scale = __fmul_rn(scale, kLog2E);
        v_scale = scale_at(segment.v_scale, request, item.kv_head);
      }
      rows.scale[thread] = scale;
      turned = !(scale > 0.0f);
      rows.v_scale[thread] = v_scale;
      if (begin < end) {
        sight.any_begin = begin;
        sight.any_end = end;
      }
      sight.all_begin = begin;
      sight.all_end = end;
    }
    rows.visible_begin[thread] = begin;
    rows.visible_end[thread] = end;
    copy_queries(query, slot);
    sight.any_begin = __reduce_min_sync(kAllLanes, sight.any_begin);
    sight.any_end = __reduce_max_sync(kAllLanes, sight.any_end);
    sight.all_begin = __reduce_max_sync(kAllLanes, sight.all_begin);
    sight.all_end = __reduce_min_sync(kAllLanes, sight.all_end);
    turned = __any_sync(kAllLanes, turned);
    if (lane_ == 0) {
      state_.sights[warp_] = sight;
      state_.turned[warp_] = turned;
    }
  }

  /// The queries of a warp's rows, of which each lane knows where its own begin; zeros for rows that the item has not.
  __device__ __forceinline__ void copy_queries(int64_t query, int32_t slot) const {
    constexpr int32_t kPieces = DimQk / kPiece;
    const uint32_t to = memory_ + static_cast<uint32_t>(kLayout.queries + slot * kMathGroups * query_bytes(DimQk));
    const AttentionParams& params = params_.attention;
#pragma unroll 2
    for (int32_t i = lane_; i < 32 * kPieces; i += 32) {
      const int64_t at = __shfl_sync(kAllLanes, query, i / kPieces);
      const uint32_t target = to + static_cast<uint32_t>(query_offset(DimQk, 32 * warp_ + i / kPieces, i % kPieces));
      const int64_t from = at < 0 ? 0 : at + i % kPieces * kPiece;
      if (params.q_wide) {
        ptx::copy_16_async(target, static_cast<const T*>(params.q) + from, at >= 0);
      } else {
        copy_any<T>(target, params.q, params.q_dtype, from, at >= 0);
      }
    }
  }

  /// What this thread has written of an item and its queries.
  __device__ __forceinline__ void hand_over(int32_t slot) const {
    const uint32_t barrier = ptx::shared_address(state_.item_full) + 8 * static_cast<uint32_t>(slot);
    ptx::arrive_after_copies(barrier);
    ptx::arrive(barrier);
  }

  /// An item's tiles, which are loaded from the last to the first. Keys are a tile ahead of values: they are multiplied
  /// while weights of the tile before are made.
  struct Tiles {
    int32_t last;
    int32_t count;
    Sight sight;
    int32_t inner_begin;  ///< values of tiles [inner_begin, inner_end), counted from the last, need no looking through
    int32_t inner_end;

    __device__ __forceinline__ Tiles(int32_t last_tile, int32_t num_tiles, const Sight& seen, bool custom)
        : last(last_tile), count(num_tiles), sight(seen) {
      const int32_t end = custom ? 0 : sight.all_end / kTokens;
      inner_begin = max(last + 1 - end, 0);
      inner_end = last + 1 - (sight.all_begin + kTokens - 1) / kTokens;
    }
    __device__ __forceinline__ int32_t first_token(int32_t i) const { return (last - i) * kTokens; }
    __device__ __forceinline__ bool is_edge(int32_t i) const { return i < inner_begin || i >= inner_end; }
  };

  /// The next stage of the ring, once it is free.
  struct Stage {
    uint32_t number;
    uint32_t tile;
    uint32_t full;
  };
  __device__ __forceinline__ Stage await_stage() {
    const Stage stage{stage_, memory_ + stage_ * stage_bytes(kDims), full_ + 8 * stage_};
    ptx::wait(empty_ + 8 * stage_, parity_ ^ 1);  // of a stage never used, the phase before the first counts as ended
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
    return stage;
  }

  /// Pages of at least eight tokens, as boxes: a warp issues `Mine` of each tile. Each lane looks up one box of the
  /// next 32 / Mine tiles, as many tiles ahead.
  template <int32_t Mine>
  __device__ __forceinline__ void load_boxes(const Tiles& tiles, const PrefillParams::Maps& maps,
                                             const SegmentCopy& copy, const int32_t* pages, int32_t head) {
    constexpr int32_t kAtOnce = 32 / Mine;
    const uint64_t policy = ptx::evict_last_policy();
    const int32_t box = copy.box;
    BoxPlace next = find_box<Mine>(tiles, 0, copy, pages);
    int32_t here = -1;
    int32_t keys[Mine];
    int32_t values[Mine];
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) keys[b] = -1;
#pragma unroll 1
    for (int32_t i = 0; i <= tiles.count; ++i) {
      if (i % kAtOnce == 0) {
        here = next.eight < 0 ? -1 : next.page * copy.eights + next.eight;
        next = find_box<Mine>(tiles, i + kAtOnce, copy, pages);  // on its way until it is needed
      }
#pragma unroll
      for (int32_t b = 0; b < Mine; ++b) {
        values[b] = keys[b];
        keys[b] = __shfl_sync(kAllLanes, here, i % kAtOnce * Mine + b);
      }
      if (i < tiles.count) {
        const Stage stage = await_stage();
        issue_boxes<DimQk, Mine>(stage.tile, stage.full, maps.k, box, keys, head, policy);
      }
      if (i == 0) continue;
      const Stage stage = await_stage();
      const bool edge = tiles.is_edge(i - 1);
      const uint32_t barrier = edge ? ptx::shared_address(&state_.landed) : stage.full;
      issue_boxes<DimV, Mine>(stage.tile, barrier, maps.v, box, values, head, policy);
      if (!edge) continue;
      ptx::wait(barrier, num_edges_ & 1);
      ++num_edges_;
      look_through_values(tiles, i - 1, stage);
    }
  }

  /// A box's page and which of its eights of tokens it begins with; -1: no row sees any of its tokens.
  struct BoxPlace {
    int32_t page;
    int32_t eight;
  };
  /// The lane's, of the warp's boxes from tile `i` on.
  template <int32_t Mine>
  __device__ __forceinline__ BoxPlace find_box(const Tiles& tiles, int32_t i, const SegmentCopy& copy,
                                               const int32_t* pages) const {
    const int32_t in_tile = (warp_ + kGroupWarps * (lane_ % Mine)) * copy.box;
    const int32_t token = tiles.first_token(i + lane_ / Mine) + in_tile;
    if (in_tile >= kTokens || token + copy.box <= tiles.sight.any_begin || token >= tiles.sight.any_end) return {0, -1};
    const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(token));
    const uint32_t in_page = static_cast<uint32_t>(token) - column * copy.page_size.divisor();
    return {pages[column], static_cast<int32_t>(in_page / kEight)};
  }

  /// Begins the copies of the warp's boxes of a tile, from eights of tokens on; their bytes and the warp's arrival at
  /// `barrier`.
  template <int32_t Dim, int32_t Mine>
  __device__ __forceinline__ void issue_boxes(uint32_t tile, uint32_t barrier, const CUtensorMap& map, int32_t box,
                                              const int32_t (&at)[Mine], int32_t head, uint64_t policy) const {
    if (!ptx::elect()) return;
    const int32_t bytes = box * 2 * Dim;
    int32_t count = 0;
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) count += at[b] >= 0 ? 1 : 0;
    ptx::arrive_expecting(barrier, static_cast<uint32_t>(count * bytes));
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) {
      if (at[b] < 0) continue;
      ptx::copy_box_5d(tile + static_cast<uint32_t>((warp_ + kGroupWarps * b) * bytes), &map, barrier, 0, 0, 0, head,
                       at[b], policy);
    }
    ptx::arrive(barrier, kIssueArrivals);
  }

  /// Values of tile `i`, which are there, before they are handed over.
  __device__ __forceinline__ void look_through_values(const Tiles& tiles, int32_t i, const Stage& stage) const {
    const int32_t first = tiles.first_token(i);
    const bool special = look_through<T, DimV>(stage.tile, tiles.sight.any_begin - first, tiles.sight.any_end - first,
                                               static_cast<int32_t>(threadIdx.x));
    const bool any = __any_sync(kAllLanes, special);
    if (lane_ == 0) state_.special[stage.number][warp_] = any ? 1 : 0;
    hand_over_tile(stage);
  }

  /// A tile that this thread has written to.
  __device__ __forceinline__ void hand_over_tile(const Stage& stage) const {
    ptx::order_before_products();
    ptx::arrive(stage.full, kLaneArrivals);
  }

  /// Any other keys and values.
  __device__ __forceinline__ void load_by_threads(const Tiles& tiles, const SegmentParams& segment,
                                                  const SegmentCopy& copy, const int32_t* pages,
                                                  const planner::WorkItem& item) {
    const int32_t first_token = segment.paged ? 0 : segment.indptr[item.kv_row];
    const int32_t head = item.kv_head;
#pragma unroll 1
    for (int32_t i = 0; i <= tiles.count; ++i) {
      if (i < tiles.count) {
        const Stage stage = await_stage();
        copy_tokens<DimQk>(tiles, i, stage.tile, segment.k, segment.dtype, segment.k_strides, head, copy, pages,
                           first_token);
        end_copies(stage, copy.direct);
      }
      if (i == 0) continue;
      const Stage stage = await_stage();
      copy_tokens<DimV>(tiles, i - 1, stage.tile, segment.v, segment.dtype, segment.v_strides, head, copy, pages,
                        first_token);
      if (!tiles.is_edge(i - 1)) {
        end_copies(stage, copy.direct);
        continue;
      }
      ptx::wait_all_copies();
      ptx::meet(kLoadMeeting, kGroupThreads);  // pieces are looked through by other threads
      look_through_values(tiles, i - 1, stage);
    }
  }

  /// The tile is there when this thread's copies are through.
  __device__ __forceinline__ void end_copies(const Stage& stage, bool direct) const {
    if (!direct) {
      hand_over_tile(stage);
      return;
    }
    ptx::arrive_after_copies(stage.full);
    ptx::arrive(stage.full);
  }

  /// Begins the copies of a tile by threads: a warp has 32 tokens, each lane knows where one of them lies. Zeros for
  /// tokens that no row sees.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_tokens(const Tiles& tiles, int32_t i, uint32_t tile, const void* data,
                                              DType dtype, const KvStrides& strides, int32_t head,
                                              const SegmentCopy& copy, const int32_t* pages,
                                              int32_t first_token) const {
    constexpr int32_t kPieces = Dim / kPiece;
    const int32_t mine = tiles.first_token(i) + static_cast<int32_t>(threadIdx.x);
    int64_t begin = -1;
    if (mine >= tiles.sight.any_begin && mine < tiles.sight.any_end) {
      begin = head * strides.head;
      if (pages == nullptr) {
        begin += (int64_t{first_token} + mine) * strides.token;
      } else {
        const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(mine));
        const uint32_t in_page = static_cast<uint32_t>(mine) - column * copy.page_size.divisor();
        begin += pages[column] * strides.page + in_page * strides.token;
      }
    }
#pragma unroll 2
    for (int32_t n = lane_; n < 32 * kPieces; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n / kPieces);
      const uint32_t target = tile + static_cast<uint32_t>(tile_offset(Dim, 32 * warp_ + n / kPieces, n % kPieces));
      const int64_t from = at < 0 ? 0 : at + n % kPieces * kPiece;
      if (copy.direct) {
        ptx::copy_16_async(target, static_cast<const T*>(data) + from, at >= 0);
      } else {
        copy_any<T>(target, data, dtype, from, at >= 0);
      }
    }
  }

  const PrefillParams& params_;
  SharedState& state_;
  const uint32_t memory_;
  const uint32_t full_;
  const uint32_t empty_;
  const int32_t warp_;
  const int32_t lane_;
  int32_t num_items_ = 0;
  int32_t num_edges_ = 0;
  uint32_t stage_ = 0;  ///< the next
  uint32_t parity_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
