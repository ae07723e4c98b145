#pragma once

#include "kernels/cuda/sm90/decode/item_queue.cuh"
#include "kernels/cuda/sm90/prefill/codes.cuh"
#include "kernels/cuda/sm90/prefill/edge_values.cuh"
#include "planner/partition_rule.hpp"
#include "ptx/tma.cuh"

/// How the loading warpgroup makes an item ready: which one it is, what its rows see, its queries. It takes thousands
/// of cycles, nearly all of them of waiting for memory, hence is done in three parts while tiles of the item before are
/// on their way.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

template <typename T, int32_t DimQk, int32_t DimV>
class ItemMaker {
 protected:
  static constexpr HeadDims kDims{DimQk, DimV};
  static constexpr SharedLayout kLayout = shared_layout(kDims);
  static constexpr int32_t kTokens = tile_tokens(kDims);
  static constexpr int32_t kItemWords = sizeof(planner::WorkItem) / 4;
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
    const planner::PlanView& plan = params_.attention.plan->view;
    int32_t index = follower_;
    if (index < 0) {
      const uint32_t claim = number == 0 ? blockIdx.x : static_cast<uint32_t>(plan.num_workers) + ticket_;
      index = claim < static_cast<uint32_t>(plan.num_claims) ? static_cast<int32_t>(claim) : -1;
    }
    index_ = __shfl_sync(kAllLanes, index, 0);
    // On its way until the second part.
    if (index_ >= 0 && lane_ < kItemWords) word_ = reinterpret_cast<const int32_t*>(plan.items + index_)[lane_];
  }

  /// The second part: what its rows see. Waits until the math warpgroups are through with the slot's last item.
  __device__ __forceinline__ void bind_item(int32_t number) {
    const int32_t slot = number % kItems;
    const int32_t use = number / kItems;
    ItemContext& context = state_.contexts[slot];
    if (use > 0) {
      ptx::wait_as_warp(ptx::shared_address(state_.item_empty) + 8 * static_cast<uint32_t>(slot),
                        static_cast<uint32_t>(use - 1) & 1);
    }
    if (warp_ == 0) {
      if (lane_ < kItemWords) reinterpret_cast<int32_t*>(&context.item)[lane_] = word_;
      if (lane_ == 0) state_.next = index_;
      __syncwarp();
    }
    ptx::meet(kLoadMeeting, kGroupThreads);
    index_ = state_.next;
    if (index_ < 0) return;
    const planner::WorkItem& item = context.item;
    if (threadIdx.x == 0) {
      follower_ = (item.flags & planner::kFinish) == 0 ? item.partial : -1;          // of the same accumulation
      if (follower_ < 0) ticket_ = atomicAdd(params_.attention.claim_counters, 1u);  // on its way until it is needed
    }
    const planner::PlanView& plan = params_.attention.plan->view;
    query_ =
        bind_row(plan, item, item.row_end - item.row_begin, has_keys(item), is_custom(plan, item), state_.rows[slot]);
  }

  /// The third part: all else that the math warpgroups are told, and the queries unless they come later.
  template <typename Self>
  __device__ __forceinline__ void end_item(Self& self, int32_t number) {
    const int32_t slot = number % kItems;
    if (index_ < 0) {
      if (threadIdx.x == 0) state_.contexts[slot].all_done = true;
      hand_over(slot);
      return;
    }
    ptx::meet(kLoadMeeting, kGroupThreads);
    if (threadIdx.x == 0) describe_item(params_.attention.plan->view, state_.contexts[slot]);
    if constexpr (!Self::kQueriesLate) self.deliver(slot);
  }

 private:
  __device__ __forceinline__ static bool has_keys(const planner::WorkItem& item) { return item.kv_begin < item.kv_end; }
  /// Whether the custom mask's bits apply.
  __device__ __forceinline__ bool is_custom(const planner::PlanView& plan, const planner::WorkItem& item) const {
    return params_.attention.mask == MaskKind::kCustom && has_keys(item) &&
           plan.segments[item.segment].mask == SegmentMask::kAsConfig;
  }

  /// By one thread, once all rows are bound.
  __device__ __forceinline__ void describe_item(const planner::PlanView& plan, ItemContext& context) const {
    const planner::WorkItem& item = context.item;
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
    context.num_rows = item.row_end - item.row_begin;
    context.first_tile = any_keys ? item.kv_begin / kTokens : 0;
    context.num_tiles = any_keys ? (item.kv_end + kTokens - 1) / kTokens - context.first_tile : 0;
    context.custom = is_custom(plan, item);
    context.turned = state_.turned[0] || state_.turned[1] || state_.turned[2] || state_.turned[3];
    context.by_threads = any_keys && params_.copies[item.segment].box == 0;
    context.queries_by_boxes = queries_by_boxes(item);
    const AttentionParams& params = params_.attention;
    context.half = params.out_dtype == DType::kFloat16;
    context.plain_end = context.num_tiles > 0 && item.flags == (planner::kStart | planner::kFinish) &&
                        item.partial < 0 && params_.out_wide &&
                        (context.half || params.out_dtype == DType::kBFloat16) && params.sinks == nullptr &&
                        params.lse.data == nullptr;
    context.out = params.out;
    context.all_done = false;
    if (any_keys) {
      context.shard = plan.segments[item.segment].shard;
      context.first_pos = plan.segments[item.segment].first_pos[item.kv_row];
    }
  }

  /// This thread's row: what it sees, to shared memory. Returns where its queries begin; -1: the item has no such row.
  __device__ __forceinline__ int64_t bind_row(const planner::PlanView& plan, const planner::WorkItem& item,
                                              int32_t num_rows, bool any_keys, bool custom, RowInfo& rows) const {
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
      rows.out[thread] = token * params.out_token_stride + q_head * params.out_head_stride;
      float scale = 0.0f;
      float v_scale = 1.0f;
      if (any_keys) {
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
        scale = __fmul_rn(scale, kLog2E);
        v_scale = scale_at(segment.v_scale, request, item.kv_head);
      }
      rows.scale[thread] = scale;
      turned = !(scale >= kUsualScale);
      rows.slope[thread] =
          params.alibi_slopes == nullptr ? 0.0f : __fmul_rn(params.alibi_slopes[rows.q_head[thread]], kLog2E);
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
    sight.any_begin = __reduce_min_sync(kAllLanes, sight.any_begin);
    sight.any_end = __reduce_max_sync(kAllLanes, sight.any_end);
    sight.all_begin = __reduce_max_sync(kAllLanes, sight.all_begin);
    sight.all_end = __reduce_min_sync(kAllLanes, sight.all_end);
    turned = __any_sync(kAllLanes, turned);
    if (lane_ == 0) {
      state_.sights[warp_] = sight;
      state_.turned[warp_] = turned;
    }
    return query;
  }

 protected:
  /// Whether an item's queries come by boxes: all rows are there, and the first is a token's first.
  __device__ __forceinline__ bool queries_by_boxes(const planner::WorkItem& item) const {
    const int32_t group_size = params_.attention.num_q_heads / params_.attention.num_kv_heads;
    return params_.queries_by_boxes && item.row_end - item.row_begin == kRows &&
           static_cast<uint32_t>(item.row_begin) % static_cast<uint32_t>(group_size) == 0;
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
        ptx::copy_16_async(target, static_cast<const uint16_t*>(params.q) + from, at >= 0);
      } else if (params.q_wide) {
        copy_eight_codes<T>(target, static_cast<const uint8_t*>(params.q) + from, params.q_dtype, at >= 0);
      } else {
        copy_any<T>(target, params.q, params.q_dtype, from, at >= 0);
      }
    }
  }

  __device__ __forceinline__ uint32_t queries_address(int32_t place) const {
    return memory_ + static_cast<uint32_t>(kLayout.queries + place * kMathGroups * query_bytes(DimQk));
  }

  /// What this thread has written of an item and its queries.
  __device__ __forceinline__ void hand_over(int32_t slot) const {
    const uint32_t barrier = ptx::shared_address(state_.item_full) + 8 * static_cast<uint32_t>(slot);
    ptx::arrive_after_copies(barrier);
    ptx::arrive(barrier);
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
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
