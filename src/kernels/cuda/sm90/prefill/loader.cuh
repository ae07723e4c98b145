#pragma once

#include "kernels/cuda/sm90/decode/copies.cuh"
#include "kernels/cuda/sm90/decode/item_queue.cuh"
#include "kernels/cuda/sm90/prefill/box_queue.cuh"
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
    begin_item(plan, 0);
    end_item(plan, 0);
    for (int32_t number = 0; index_ >= 0; ++number) load_tiles(plan, number);
    if (warp_ == 0) ItemQueue(plan, params_.attention.claim_counters).finish();
  }

 private:
  /// The first half of what is done for item `number` before its tiles are loaded, while those of the item before are:
  /// which one it is, to its slot. Waits until the math warpgroups are through with the slot's last.
  __device__ __forceinline__ void begin_item(const planner::PlanView& plan, int32_t number) {
    const int32_t slot = number % kItems;
    const int32_t use = number / kItems;
    if (use > 0) ptx::wait(ptx::shared_address(state_.item_empty) + 8 * slot, (use - 1) & 1);
    if (threadIdx.x == 0) {
      const auto claim = static_cast<int32_t>(number == 0 ? blockIdx.x : plan.num_workers + ticket_);
      const int32_t index = follower_ >= 0 ? follower_ : (claim < plan.num_claims ? claim : -1);
      state_.next = index;
      if (index >= 0) {
        const planner::WorkItem item = plan.items[index];
        state_.contexts[slot].item = item;
        follower_ = (item.flags & planner::kFinish) == 0 ? item.partial : -1;          // of the same accumulation
        if (follower_ < 0) ticket_ = atomicAdd(params_.attention.claim_counters, 1u);  // on its way until it is needed
      }
    }
    ptx::meet(kLoadMeeting, kGroupThreads);
    index_ = state_.next;
  }

  /// The second half: what its rows see, and its queries.
  __device__ __forceinline__ void end_item(const planner::PlanView& plan, int32_t number) {
    const int32_t slot = number % kItems;
    ItemContext& context = state_.contexts[slot];
    if (index_ < 0) {
      if (threadIdx.x == 0) context.all_done = true;
      hand_over(slot, false);
      return;
    }
    const planner::WorkItem& item = context.item;
    const AttentionParams& params = params_.attention;
    const bool has_keys = item.kv_begin < item.kv_end;
    const bool custom =
        has_keys && params.mask == MaskKind::kCustom && plan.segments[item.segment].mask == SegmentMask::kAsConfig;
    const int32_t num_rows = item.row_end - item.row_begin;
    const int32_t group_size = params.num_q_heads / params.num_kv_heads;
    const bool boxes = params_.queries_by_boxes && num_rows == kRows && item.row_begin % group_size == 0;
    bind_row(plan, item, num_rows, has_keys, custom, state_.rows[slot], slot, boxes);
    ptx::meet(kLoadMeeting, kGroupThreads);
    if (threadIdx.x == 0) {
      Sight sight = state_.sights[0];
#pragma unroll
      for (int32_t w = 1; w < kGroupWarps; ++w) {
        const Sight other = state_.sights[w];
        sight.any_begin = min(sight.any_begin, other.any_begin);
        sight.any_end = max(sight.any_end, other.any_end);
        sight.all_begin = max(sight.all_begin, other.all_begin);
        sight.all_end = min(sight.all_end, other.all_end);
      }
      context.sight = sight;
      context.num_rows = num_rows;
      context.first_tile = has_keys ? item.kv_begin / kTokens : 0;
      context.num_tiles = has_keys ? (item.kv_end + kTokens - 1) / kTokens - context.first_tile : 0;
      context.custom = custom;
      context.turned = state_.turned[0] || state_.turned[1] || state_.turned[2] || state_.turned[3];
      context.by_threads = has_keys && params_.copies[item.segment].box == 0;
      context.queries_by_threads = !boxes;
      context.all_done = false;
      if (has_keys && params.alibi_slopes != nullptr) {
        context.shard = plan.segments[item.segment].shard;
        context.first_pos = plan.segments[item.segment].first_pos[item.kv_row];
      }
    }
    hand_over(slot, boxes);
    if (boxes && threadIdx.x == 0) {
      const uint32_t barrier = ptx::shared_address(state_.item_full) + 8 * static_cast<uint32_t>(slot);
      const uint64_t policy = ptx::evict_first_policy();
#pragma unroll
      for (int32_t group = 0; group < kMathGroups; ++group) {
        ptx::copy_box_5d(queries_address(slot) + static_cast<uint32_t>(group * query_bytes(DimQk)), &params_.queries,
                         barrier, 0, item.kv_head * group_size, (item.row_begin + group * kGroupRows) / group_size, 0,
                         0, policy);
      }
    }
  }

  /// This thread's row: what it sees, to shared memory; its warp's queries to theirs, unless they come by boxes.
  __device__ __forceinline__ void bind_row(const planner::PlanView& plan, const planner::WorkItem& item,
                                           int32_t num_rows, bool has_keys, bool custom, RowInfo& rows, int32_t slot,
                                           bool boxes) const {
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
    if (!boxes) copy_queries(query, slot);
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
    const uint32_t to = queries_address(slot);
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

  __device__ __forceinline__ uint32_t queries_address(int32_t slot) const {
    return memory_ + static_cast<uint32_t>(kLayout.queries + slot * kMathGroups * query_bytes(DimQk));
  }

  /// What this thread has written of an item and its queries; by the first thread also the bytes of their boxes.
  __device__ __forceinline__ void hand_over(int32_t slot, bool boxes) const {
    const uint32_t barrier = ptx::shared_address(state_.item_full) + 8 * static_cast<uint32_t>(slot);
    ptx::arrive_after_copies(barrier);
    if (boxes && threadIdx.x == 0) {
      ptx::arrive_expecting(barrier, static_cast<uint32_t>(kMathGroups * query_bytes(DimQk)));
    } else {
      ptx::arrive(barrier);
    }
  }

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

  /// The tiles of item `number`, keys two tiles ahead of values; between the first of them, the next item is made
  /// ready.
  __device__ __forceinline__ void load_tiles(const planner::PlanView& plan, int32_t number) {
    ptx::meet(kLoadMeeting, kGroupThreads);  // the first thread has written the context
    const ItemContext& context = state_.contexts[number % kItems];
    const planner::WorkItem& item = context.item;
    const Tiles tiles(context.first_tile + context.num_tiles - 1, context.num_tiles, context.sight, context.custom);
    const int32_t number_of_segment = item.segment;
    const int32_t head = item.kv_head;
    const SegmentParams& segment = params_.attention.segments[number_of_segment];
    const SegmentCopy& copy = params_.copies[number_of_segment];
    const PrefillParams::Maps& maps = params_.maps[number_of_segment];
    const int32_t kv_row = item.kv_row;
    const int32_t* pages = nullptr;
    int32_t first_token = 0;
    if (tiles.count > 0) {
      if (segment.paged) {
        pages = segment.indices + (segment.indptr != nullptr ? int64_t{segment.indptr[kv_row]}
                                                             : kv_row * segment.row_stride + segment.first_column);
      } else {
        first_token = segment.indptr[kv_row];
      }
    }
    const int32_t box = copy.box;
    BoxQueue boxes(warp_, lane_, tiles, copy, pages);
    const int32_t end = max(tiles.count, 2);
#pragma unroll 1
    for (int32_t i = -2; i < end; ++i) {
      bool look = false;
      Stage looked{};
      if (i >= 0 && i < tiles.count) {
        Boxes values;
        if (box > 0) values = boxes.of(i);
        const Stage stage = await_stage();
        const bool edge = tiles.is_edge(i);
        if (box > 0) {
          issue_boxes<DimV>(stage.tile, edge ? ptx::shared_address(&state_.landed) : stage.full, maps.v, box, values,
                            head);
          look = edge;
          looked = stage;
        } else {
          copy_tokens<DimV>(tiles, i, stage.tile, segment.v, segment.dtype, segment.v_strides, head, copy, pages,
                            first_token);
          if (edge) {
            ptx::wait_all_copies();
            ptx::meet(kLoadMeeting, kGroupThreads);  // pieces are looked through by other threads
            look_through_values(tiles, i, stage);
          } else {
            end_copies(stage, copy.direct);
          }
        }
      }
      if (i == 1) end_item(plan, number + 1);
      if (i + 2 < tiles.count) {
        Boxes keys;
        if (box > 0) {
          boxes.advance(i + 2);
          keys = boxes.of(i + 2);
        }
        const Stage stage = await_stage();
        if (box > 0) {
          issue_boxes<DimQk>(stage.tile, stage.full, maps.k, box, keys, head);
        } else {
          copy_tokens<DimQk>(tiles, i + 2, stage.tile, segment.k, segment.dtype, segment.k_strides, head, copy, pages,
                             first_token);
          end_copies(stage, copy.direct);
        }
      }
      if (look) {
        ptx::wait(ptx::shared_address(&state_.landed), num_edges_ & 1);
        ++num_edges_;
        look_through_values(tiles, i, looked);
      }
      if (i == 0) begin_item(plan, number + 1);
    }
  }

  /// Begins the copies of the warp's boxes of a tile, their bytes and the warp's arrivals at `barrier`.
  template <int32_t Dim>
  __device__ __forceinline__ void issue_boxes(uint32_t tile, uint32_t barrier, const CUtensorMap& map, int32_t box,
                                              const Boxes& boxes, int32_t head) const {
    if (!ptx::elect()) return;
    const int32_t bytes = box * 2 * Dim;
    int32_t count = 0;
#pragma unroll
    for (int32_t b = 0; b < kMostBoxes; ++b) count += boxes.at[b] >= 0 ? 1 : 0;
    ptx::arrive_expecting(barrier, static_cast<uint32_t>(count * bytes));
#pragma unroll
    for (int32_t b = 0; b < kMostBoxes; ++b) {
      if (boxes.at[b] < 0) continue;
      ptx::copy_box_5d(tile + static_cast<uint32_t>((warp_ + kGroupWarps * b) * bytes), &map, barrier, 0, 0, 0, head,
                       boxes.at[b], policy_);
    }
    ptx::arrive(barrier, kIssueArrivals);
  }

  /// Values of tile `i`, which are there, before they are handed over.
  __device__ __forceinline__ void look_through_values(const Tiles& tiles, int32_t i, const Stage& stage) const {
    const int32_t first = tiles.first_token(i);
    int32_t thread = 32 * warp_ + lane_;
    asm volatile("" : "+r"(thread));
    const bool special =
        look_through<T, DimV>(stage.tile, tiles.sight.any_begin - first, tiles.sight.any_end - first, thread);
    const bool any = __any_sync(kAllLanes, special);
    if (lane_ == 0) state_.special[stage.number][warp_] = any ? 1 : 0;
    hand_over_tile(stage);
  }

  /// A tile that this thread has written to.
  __device__ __forceinline__ void hand_over_tile(const Stage& stage) const {
    ptx::order_before_products();
    ptx::arrive(stage.full, kLaneArrivals);
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
    int32_t thread = 32 * warp_ + lane_;
    asm volatile("" : "+r"(thread));  // places are computed here: loops of boxes have no registers for them
    const int32_t lane = thread % 32;
    const int32_t warp = thread / 32;
    const int32_t mine = tiles.first_token(i) + thread;
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
    for (int32_t n = lane; n < 32 * kPieces; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n / kPieces);
      const uint32_t target = tile + static_cast<uint32_t>(tile_offset(Dim, 32 * warp + n / kPieces, n % kPieces));
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
  const uint64_t policy_ = ptx::evict_last_policy();
  int32_t index_ = -1;     ///< of the item that is made ready; -1: there is none
  int32_t follower_ = -1;  ///< by the first thread: item of the same accumulation that comes next, or -1
  uint32_t ticket_ = 0;    ///< by the first thread: of its last claim
  int32_t num_edges_ = 0;
  uint32_t stage_ = 0;  ///< the next
  uint32_t parity_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
