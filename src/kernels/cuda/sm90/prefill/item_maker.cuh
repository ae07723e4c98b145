#pragma once

#include "kernels/cuda/sm90/common/tile_scheduler.cuh"
#include "kernels/cuda/sm90/prefill/codes.cuh"
#include "kernels/cuda/sm90/prefill/edge_values.cuh"
#include "kernels/cuda/sm90/prefill/launch.hpp"
#include "ptx/tma.cuh"
#include "scheduler/mask_bounds.hpp"

/// How the loading warpgroup makes an item ready: which one it is, what its rows see, its queries. It takes 8,000 to
/// 10,000 cycles, hence is done in parts while tiles of the item before are on their way: what a part fetches from
/// global memory the next one takes, and none is longer than the ring has tiles for.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

template <typename T, int32_t DimQk, int32_t DimV, Variant kVariant>
class ItemMaker {
 protected:
  static constexpr HeadDims kDims{DimQk, DimV};
  static constexpr SharedLayout kLayout = shared_layout(kDims);
  static constexpr int32_t kTokens = tile_tokens(kDims);
  static constexpr int32_t kItemWords = sizeof(scheduler::WorkTile) / 4;
  static_assert(kItemWords <= 32);

  __device__ __forceinline__ ItemMaker(const PrefillParams& params, unsigned char* memory, SharedState& state)
      : params_(params),
        state_(state),
        memory_(ptx::shared_address(memory)),
        warp_(__shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  /// The first part for item `number`: the first warp asks for it.
  __device__ __forceinline__ void begin_item(int32_t number) {
    if (warp_ != 0) return;
    const scheduler::PlanView& plan = params_.attention.plan->view;
    int32_t index = follower_;
    if (index < 0) {
      const uint32_t claim = number == 0 ? blockIdx.x : static_cast<uint32_t>(plan.num_workers) + ticket_;
      index = claim < static_cast<uint32_t>(plan.num_dynamic_tiles) ? static_cast<int32_t>(claim) : -1;
    }
    index_ = __shfl_sync(kAllLanes, index, 0);
    // On its way until the second part.
    if (index_ >= 0 && lane_ < kItemWords) word_ = reinterpret_cast<const int32_t*>(plan.work_tiles + index_)[lane_];
  }

  /// The second part: its rows. Waits until the math warpgroups are through with the slot's last item.
  __device__ __forceinline__ void take_item(int32_t number) {
    const int32_t slot = number % kItems;
    ItemContext& context = state_.contexts[slot];
    if (number >= kItems) store_results(number - kItems);
    if (warp_ == 0) {
      __syncwarp();
      if (lane_ < kItemWords) reinterpret_cast<int32_t*>(&context.item)[lane_] = word_;
      if (lane_ == 0) state_.next = index_;
      __syncwarp();
    }
    ptx::named_barrier_sync(kLoadMeeting, kGroupThreads);
    index_ = state_.next;
    if (index_ < 0) return;
    const scheduler::WorkTile& item = context.item;
    if (threadIdx.x == 0) {
      follower_ = (item.flags & scheduler::kFinish) == 0 ? item.partial : -1;       // of the same accumulation
      if (follower_ < 0) ticket_ = atomicAdd(params_.attention.tile_counters, 1u);  // on its way until it is needed
    }
    fetch_lengths(params_.attention.plan->view, item);
    query_ = find_row(item, state_.rows[slot]);
  }

  /// The third part: what its rows see.
  __device__ __forceinline__ void bind_item(int32_t number) {
    if (index_ < 0) return;
    const int32_t slot = number % kItems;
    bind_row(params_.attention.plan->view, state_.contexts[slot], state_.rows[slot]);
  }

  /// The fourth part: all else that the math warpgroups are told.
  __device__ __forceinline__ void end_item(int32_t number) {
    const int32_t slot = number % kItems;
    if (index_ < 0) {
      if (threadIdx.x == 0) state_.contexts[slot].all_done = true;
      hand_over(slot);
      return;
    }
    ptx::tma_store_wait_read();
    ptx::named_barrier_sync(kLoadMeeting, kGroupThreads);  // the place of the queries may be written to
    if (threadIdx.x == 0) describe_item(state_.contexts[slot]);
  }

 private:
  __device__ __forceinline__ static bool has_keys(const scheduler::WorkTile& item) {
    return item.kv_begin < item.kv_end;
  }
  /// Whether the custom mask's bits apply.
  __device__ __forceinline__ bool is_custom(const scheduler::PlanView& plan, const scheduler::WorkTile& item) const {
    return params_.attention.mask == MaskKind::kCustom && has_keys(item) &&
           plan.segments[item.segment].mask == SegmentMask::kAsConfig;
  }

  /// What bind_row needs to know of the item's first request and of its keys, a lane each: on its way until then.
  __device__ __forceinline__ void fetch_lengths(const scheduler::PlanView& plan, const scheduler::WorkTile& item) {
    if (!has_keys(item)) return;
    const scheduler::SegmentLengths& lengths = plan.segments[item.segment];
    static_assert(sizeof(KvShard) == 12 && sizeof(SegmentMask) == 4);
    const auto* const shard = reinterpret_cast<const int32_t*>(&lengths.shard);
    const int32_t* const indptr = params_.attention.segments[item.segment].indptr;
    if (lane_ >= kLengths || (lane_ == kFirstPage && indptr == nullptr)) return;
    const int32_t* const from[kLengths] = {plan.cu_q + item.request,
                                           plan.cu_q + item.request + 1,
                                           plan.q_first_pos + item.request,
                                           lengths.kv_len + item.kv_row,
                                           lengths.first_pos + item.kv_row,
                                           indptr == nullptr ? nullptr : indptr + item.kv_row,
                                           reinterpret_cast<const int32_t*>(&lengths.mask),
                                           shard,
                                           shard + 1,
                                           shard + 2};
    const int32_t* at = from[0];
#pragma unroll
    for (int32_t i = 1; i < kLengths; ++i) at = lane_ == i ? from[i] : at;
    length_ = *at;
  }

  /// By one thread, once all rows are bound.
  __device__ __forceinline__ void describe_item(ItemContext& context) const {
    const scheduler::WorkTile& item = context.item;
    const bool any_keys = has_keys(item);
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
    if constexpr (kVariant == Variant::kAlibi) {
      context.whole_end =
          min(min(state_.whole_end[0], state_.whole_end[1]), min(state_.whole_end[2], state_.whole_end[3]));
    }
    context.num_rows = item.row_end - item.row_begin;
    context.first_tile = any_keys ? item.kv_begin / kTokens : 0;
    context.num_tiles = any_keys ? (item.kv_end + kTokens - 1) / kTokens - context.first_tile : 0;
    context.turned = state_.turned[0] || state_.turned[1] || state_.turned[2] || state_.turned[3];
    context.by_threads = any_keys && params_.copies[item.segment].box == 0;
    context.queries_by_boxes = params_.queries_by_boxes && has_whole_rows(item);
    const AttentionParams& params = params_.attention;
    context.half = params.out_dtype == DType::kFloat16;
    context.plain_end = context.num_tiles > 0 && item.flags == (scheduler::kStart | scheduler::kFinish) &&
                        item.partial < 0 && params_.out_wide &&
                        (context.half || params.out_dtype == DType::kBFloat16) && params.sinks == nullptr &&
                        params.lse.data == nullptr;
    context.results_by_boxes = context.plain_end && params_.results_by_boxes && has_whole_rows(item);
    context.out = params.out;
    context.all_done = false;
  }

  /// This thread's row: which it is, to shared memory; kAlibi: its slope is on its way. Returns where its queries
  /// begin; -1: the item has no such row.
  __device__ __forceinline__ int64_t find_row(const scheduler::WorkTile& item, RowInfo& rows) {
    const int32_t thread = 32 * warp_ + lane_;
    const AttentionParams& params = params_.attention;
    if (thread >= item.row_end - item.row_begin) return -1;
    const auto group_size = static_cast<int32_t>(params_.group.divisor());
    const int32_t packed = item.row_begin + thread;
    const auto token = static_cast<int32_t>(params_.group.quotient(static_cast<uint32_t>(packed)));
    const int32_t q_head = item.kv_head * group_size + (packed - token * group_size);
    rows.token[thread] = token;
    rows.q_head[thread] = q_head;
    rows.out[thread] = token * params.out_token_stride + q_head * params.out_head_stride;
    if constexpr (kVariant == Variant::kAlibi) {
      slope_ = params.alibi_slopes[q_head];
    } else {
      rows.slope[thread] = params.alibi_slopes == nullptr ? 0.0f : __fmul_rn(params.alibi_slopes[q_head], kLog2E);
    }
    return token * params.q_token_stride + q_head * params.q_head_stride;
  }

  /// What this thread's row sees, to shared memory; by the first thread, what is known of all keys.
  __device__ __forceinline__ void bind_row(const scheduler::PlanView& plan, ItemContext& context, RowInfo& rows) const {
    const scheduler::WorkTile& item = context.item;
    const int32_t thread = 32 * warp_ + lane_;
    const AttentionParams& params = params_.attention;
    const bool custom = is_custom(plan, item);
    if (thread == 0) context.custom = custom;
    int32_t lengths_of[kLengths];
#pragma unroll
    for (int32_t i = 0; i < kLengths; ++i) lengths_of[i] = __shfl_sync(kAllLanes, length_, i);
    Sight sight{INT32_MAX, 0, 0, INT32_MAX};
    int32_t begin = 0;
    int32_t end = 0;
    int32_t whole_end = INT32_MAX;
    bool turned = false;
    if (thread < item.row_end - item.row_begin) {
      float scale = 0.0f;
      float v_scale = 1.0f;
      if (has_keys(item)) {
        const SegmentParams& segment = params.segments[item.segment];
        auto [first_row, row_end, first_query, kv_len, first_pos, first_page, mask, world, rank, interleave] =
            lengths_of;
        const KvShard shard{world, rank, interleave};
        const int32_t token = rows.token[thread];
        int32_t request = item.request;
        while (row_end <= token) {
          first_row = row_end;
          ++request;
          row_end = plan.cu_q[request + 1];
          first_query = plan.q_first_pos[request];
        }
        const int32_t number = token - first_row;
        const int64_t position = int64_t{first_query} + number;
        const scheduler::MaskBounds mask_bounds = scheduler::mask_bounds(params.mask, static_cast<SegmentMask>(mask),
                                                                         params.window_left, params.window_right);
        const scheduler::TokenRange range = scheduler::visible_range({first_pos, kv_len, shard}, mask_bounds, position);
        if (thread == 0) {
          context.shard = shard;
          context.first_pos = first_pos;
          context.pages = !segment.paged
                              ? nullptr
                              : segment.indices + (segment.indptr != nullptr
                                                       ? int64_t{first_page}
                                                       : item.kv_row * segment.row_stride + segment.first_column);
        }
        begin = static_cast<int32_t>(range.begin < item.kv_begin ? item.kv_begin : range.begin);
        end = static_cast<int32_t>(range.end > item.kv_end ? item.kv_end : range.end);
        if (begin >= end) begin = end = 0;
        rows.position[thread] = static_cast<int32_t>(position);
        if (kVariant == Variant::kAlibi && position - first_pos < end) {  // see add_bias
          whole_end = max(static_cast<int32_t>(position - first_pos) + 1, 0);
        }
        rows.mask_begin[thread] = INT32_MAX;
        if (custom) {
          const int32_t mask_begin = plan.mask_first_column[request] - plan.segments[item.segment].key_offset[request];
          rows.mask_begin[thread] = mask_begin;
          rows.mask_bit[thread] =
              8 * plan.mask_byte_indptr[request] + int64_t{number} * plan.mask_columns[request] - mask_begin;
        }
        scale = __fmul_rn(__fmul_rn(scale_at(params.q_scale, request, item.kv_head),
                                    scale_at(segment.k_scale, request, item.kv_head)),
                          params.sm_scale);
        scale = __fmul_rn(scale, kLog2E);
        v_scale = scale_at(segment.v_scale, request, item.kv_head);
      }
      rows.scale[thread] = scale;
      if constexpr (kVariant == Variant::kAlibi) rows.slope[thread] = __fmul_rn(slope_, kLog2E);
      turned = !(scale >= kUsualScale);
      rows.v_scale[thread] = v_scale;
      if (begin < end) {
        sight.any_begin = begin;
        sight.any_end = end;
      }
      sight.all_begin = begin;
      sight.all_end = end;
      whole_end = min(whole_end, end);
    }
    rows.visible_begin[thread] = begin;
    rows.visible_end[thread] = end;
    sight.any_begin = __reduce_min_sync(kAllLanes, sight.any_begin);
    sight.any_end = __reduce_max_sync(kAllLanes, sight.any_end);
    sight.all_begin = __reduce_max_sync(kAllLanes, sight.all_begin);
    sight.all_end = __reduce_min_sync(kAllLanes, sight.all_end);
    if constexpr (kVariant == Variant::kAlibi) whole_end = __reduce_min_sync(kAllLanes, whole_end);
    turned = __any_sync(kAllLanes, turned);
    if (lane_ == 0) {
      state_.sights[warp_] = sight;
      state_.turned[warp_] = turned;
      if constexpr (kVariant == Variant::kAlibi) state_.whole_end[warp_] = whole_end;
    }
  }

 protected:
  /// Whether all rows of an item are there, and the first is a token's first: so boxes may be copied of them.
  __device__ __forceinline__ bool has_whole_rows(const scheduler::WorkTile& item) const {
    return item.row_end - item.row_begin == kRows &&
           params_.group.remainder(static_cast<uint32_t>(item.row_begin)) == 0;
  }

  /// Begins to store the results of item `number`, which the math warpgroups are through with, by the first thread.
  __device__ __forceinline__ void store_results(int32_t number) const {
    const int32_t slot = number % kItems;
    ptx::mbarrier_wait_warp(ptx::shared_address(state_.item_empty) + 8 * static_cast<uint32_t>(slot),
                            static_cast<uint32_t>(number / kItems) & 1);
    if (threadIdx.x != 0 || !state_.contexts[slot].results_by_boxes) return;
    const scheduler::WorkTile& item = state_.contexts[slot].item;
#pragma unroll
    for (int32_t group = 0; group < kMathGroups; ++group) {
      const uint32_t token = params_.group.quotient(static_cast<uint32_t>(item.row_begin + group * kGroupRows));
      ptx::tma_store_5d(&params_.results,
                        queries_address(slot % query_places(kDims)) + static_cast<uint32_t>(group * query_bytes(DimQk)),
                        0, item.kv_head * static_cast<int32_t>(params_.group.divisor()), static_cast<int32_t>(token), 0,
                        0);
    }
  }

  /// The queries of a warp's rows, of which each lane knows where its own begin; zeros for rows that the item has not.
  __device__ __forceinline__ void copy_queries(int64_t query, int32_t place) const {
    constexpr int32_t kPieces = DimQk / kPiece;
    const uint32_t to = queries_address(place);
    const AttentionParams& params = params_.attention;
#pragma unroll 2
    for (int32_t i = lane_; i < 32 * kPieces; i += 32) {
      const int64_t at = __shfl_sync(kAllLanes, query, i / kPieces);
      const uint32_t target = to + static_cast<uint32_t>(query_offset(DimQk, 32 * warp_ + i / kPieces, i % kPieces));
      const int64_t from = at < 0 ? 0 : at + i % kPieces * kPiece;
      if (params.q_wide && !is_fp8(params.q_dtype)) {
        ptx::cp_async_16(target, static_cast<const uint16_t*>(params.q) + from, at >= 0);
      } else if (params.q_wide) {
        copy_eight_codes<T>(target, static_cast<const uint8_t*>(params.q) + from, params.q_dtype, at >= 0);
      } else {
        copy_upcast_16B<T>(target, params.q, params.q_dtype, from, at >= 0);
      }
    }
  }

  __device__ __forceinline__ uint32_t queries_address(int32_t place) const {
    return memory_ + static_cast<uint32_t>(kLayout.queries + place * kMathGroups * query_bytes(DimQk));
  }

  /// What this thread has written of an item and its queries.
  __device__ __forceinline__ void hand_over(int32_t slot) const {
    const uint32_t barrier = ptx::shared_address(state_.item_full) + 8 * static_cast<uint32_t>(slot);
    ptx::cp_async_mbarrier_arrive(barrier);
    ptx::mbarrier_arrive(barrier);
  }

  const PrefillParams& params_;
  SharedState& state_;
  const uint32_t memory_;
  const int32_t warp_;
  const int32_t lane_;
  int32_t index_ = -1;  ///< of the item that is made ready; -1: there is none
  int64_t query_ = -1;  ///< where the queries of this thread's row of it begin; -1: it has no such row

 private:
  int32_t follower_ = -1;  ///< the first thread's: item of the same accumulation that comes next, or -1
  uint32_t ticket_ = 0;    ///< the first thread's: of its last claim
  int32_t word_ = 0;       ///< the first warp's: of the item
  int32_t length_ = 0;     ///< see fetch_lengths
  float slope_ = 0.0f;     ///< kAlibi: of this thread's row
  static constexpr int32_t kLengths = 10;
  static constexpr int32_t kFirstPage = 5;  ///< among them; there is none without an indptr
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
