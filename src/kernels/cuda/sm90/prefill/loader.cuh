#pragma once

#include "kernels/cuda/sm90/decode/copies.cuh"
#include "kernels/cuda/sm90/decode/item_queue.cuh"
#include "kernels/cuda/sm90/prefill/edge_values.cuh"
#include "planner/partition_rule.hpp"
#include "ptx/tma.cuh"

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
        thread_(static_cast<int32_t>(threadIdx.x)) {}

  __device__ __forceinline__ void run() {
    const planner::PlanView& plan = params_.attention.plan->view;
    const ItemQueue queue(plan, params_.attention.claim_counters);
    int32_t next = queue.first();  // the first thread's
    for (;; ++num_items_) {
      const int32_t slot = num_items_ % kItems;
      const int32_t use = num_items_ / kItems;
      if (use > 0) ptx::wait(ptx::shared_address(state_.item_empty) + 8 * slot, (use - 1) & 1);
      if (thread_ == 0) state_.next = next;
      ptx::meet(kLoadMeeting, kGroupThreads);
      const int32_t index = state_.next;
      if (index < 0) break;
      const planner::WorkItem& item = plan.items[index];
      if (thread_ == 0) next = next_of(plan, item);
      load_item(plan, item, slot);
    }
    if (thread_ == 0) state_.contexts[num_items_ % kItems].all_done = true;
    hand_over(num_items_ % kItems);
    if (warp() == 0) queue.finish();
  }

 private:
  __device__ __forceinline__ int32_t warp() const { return thread_ / 32; }
  __device__ __forceinline__ int32_t lane() const { return thread_ % 32; }

  /// Index of the item after `item`: of the same accumulation, or the next claim's; -1: none. By one thread.
  __device__ __forceinline__ int32_t next_of(const planner::PlanView& plan, const planner::WorkItem& item) const {
    if ((item.flags & planner::kFinish) == 0) return item.partial;
    const uint32_t claim =
        static_cast<uint32_t>(plan.num_workers) + atomicAdd(params_.attention.claim_counters, 1u);
    return claim < static_cast<uint32_t>(plan.num_claims) ? static_cast<int32_t>(claim) : -1;
  }

  __device__ __forceinline__ void load_item(const planner::PlanView& plan, const planner::WorkItem& item, int32_t slot) {
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
    if (thread_ == 0) {
      ItemContext& context = state_.contexts[slot];
      context.item = item;
      context.sight = sight;
      context.num_rows = num_rows;
      context.first_tile = first_tile;
      context.num_tiles = num_tiles;
      context.custom = custom;
      context.by_threads = has_keys && copy.box == 0;
      context.all_done = false;
      if (has_keys) {
        context.shard = plan.segments[item.segment].shard;
        context.first_pos = plan.segments[item.segment].first_pos[item.kv_row];
      }
    }
    hand_over(slot);
    if (num_tiles == 0) return;
    segment_ = &params.segments[item.segment];
    maps_ = &params_.maps[item.segment];
    copy_ = &copy;
    sight_ = sight;
    custom_ = custom;
    head_ = item.kv_head;
    last_tile_ = first_tile + num_tiles - 1;
    num_item_tiles_ = num_tiles;
    first_token_ = segment_->paged ? 0 : segment_->indptr[item.kv_row];
    pages_ = !segment_->paged
                 ? nullptr
                 : segment_->indices + (segment_->indptr != nullptr
                                            ? int64_t{segment_->indptr[item.kv_row]}
                                            : item.kv_row * segment_->row_stride + segment_->first_column);
    // Keys are a tile ahead of values: they are multiplied while weights of the tile before are made.
#pragma unroll 1
    for (int32_t i = 0; i <= num_tiles; ++i) {
      if (i < num_tiles) load_tile<DimQk, false>(i);
      if (i > 0) load_tile<DimV, true>(i - 1);
    }
  }

  /// This thread's row: what it sees, to shared memory; its warp's queries to theirs.
  __device__ __forceinline__ void bind_row(const planner::PlanView& plan, const planner::WorkItem& item,
                                           int32_t num_rows, bool has_keys, bool custom, RowInfo& rows,
                                           int32_t slot) const {
    const AttentionParams& params = params_.attention;
    Sight sight{INT32_MAX, 0, 0, INT32_MAX};
    int64_t query = -1;
    int32_t begin = 0;
    int32_t end = 0;
    if (thread_ < num_rows) {
      const int32_t group_size = params.num_q_heads / params.num_kv_heads;
      const int32_t packed = item.row_begin + thread_;
      const int32_t token = packed / group_size;
      const int32_t q_head = item.kv_head * group_size + (packed - token * group_size);
      query = token * params.q_token_stride + q_head * params.q_head_stride;
      rows.token[thread_] = token;
      rows.q_head[thread_] = q_head;
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
        rows.position[thread_] = static_cast<int32_t>(position);
        rows.mask_begin[thread_] = INT32_MAX;
        if (custom) {
          const int32_t mask_begin = plan.mask_first_column[request] - lengths.key_offset[request];
          rows.mask_begin[thread_] = mask_begin;
          rows.mask_bit[thread_] =
              8 * plan.mask_byte_indptr[request] + int64_t{number} * plan.mask_columns[request] - mask_begin;
        }
        scale = __fmul_rn(__fmul_rn(scale_at(params.q_scale, request, item.kv_head),
                                    scale_at(segment.k_scale, request, item.kv_head)),
                          params.sm_scale);
        if (!has_bias(params)) scale = __fmul_rn(scale, kLog2E);
        v_scale = scale_at(segment.v_scale, request, item.kv_head);
      }
      rows.scale[thread_] = scale;
      rows.v_scale[thread_] = v_scale;
      if (begin < end) {
        sight.any_begin = begin;
        sight.any_end = end;
      }
      sight.all_begin = begin;
      sight.all_end = end;
    }
    rows.visible_begin[thread_] = begin;
    rows.visible_end[thread_] = end;
    copy_queries(query, slot);
    sight.any_begin = __reduce_min_sync(kAllLanes, sight.any_begin);
    sight.any_end = __reduce_max_sync(kAllLanes, sight.any_end);
    sight.all_begin = __reduce_max_sync(kAllLanes, sight.all_begin);
    sight.all_end = __reduce_min_sync(kAllLanes, sight.all_end);
    if (lane() == 0) state_.sights[warp()] = sight;
  }

  /// The queries of a warp's rows, of which each lane knows where its own begin; zeros for rows that the item has not.
  __device__ __forceinline__ void copy_queries(int64_t query, int32_t slot) const {
    constexpr int32_t kPieces = DimQk / kPiece;
    const uint32_t to =
        memory_ + static_cast<uint32_t>(kLayout.queries + slot * kMathGroups * query_bytes(DimQk));
    const AttentionParams& params = params_.attention;
#pragma unroll 2
    for (int32_t i = lane(); i < 32 * kPieces; i += 32) {
      const int64_t at = __shfl_sync(kAllLanes, query, i / kPieces);
      const uint32_t target =
          to + static_cast<uint32_t>(query_offset(DimQk, 32 * warp() + i / kPieces, i % kPieces));
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

  /// Tile `i` of the item, counted from its last, when the next stage is free.
  template <int32_t Dim, bool Values>
  __device__ __forceinline__ void load_tile(int32_t i) {
    const int32_t first = (last_tile_ - i) * kTokens;
    const bool edge = Values && (custom_ || needs_mask(sight_, first));
    const auto slot = static_cast<uint32_t>(num_tiles_ % kStages);
    const int32_t use = num_tiles_ / kStages;
    ++num_tiles_;
    const uint32_t to = memory_ + slot * stage_bytes(kDims);
    const uint32_t full = full_ + 8 * slot;
    if (use > 0) ptx::wait(empty_ + 8 * slot, (use - 1) & 1);
    if (copy_->box == 0) {
      copy_tokens<Dim, Values>(first, to);
      if (!edge && copy_->direct) {
        ptx::arrive_after_copies(full);
        return;
      }
      ptx::wait_all_copies();
      if (edge) ptx::meet(kLoadMeeting, kGroupThreads);  // pieces are looked through by others
    } else {
      const uint32_t barrier = edge ? ptx::shared_address(&state_.landed) : full;
      issue_boxes<Dim, Values>(i, to, barrier, edge);
      if (!edge) return;
      ptx::wait(barrier, num_edges_ & 1);
      ++num_edges_;
    }
    if (edge) {
      const bool special = look_through<T, Dim>(to, sight_.any_begin - first, sight_.any_end - first, thread_);
      const bool any = __any_sync(kAllLanes, special);
      if (lane() == 0) state_.special[slot][warp()] = any ? 1 : 0;
    }
    ptx::order_before_products();
    ptx::arrive(full);
  }

  /// Begins the warp's share of a tile's boxes; bytes and arrivals at `barrier`.
  template <int32_t Dim, bool Values>
  __device__ __forceinline__ void issue_boxes(int32_t i, uint32_t to, uint32_t barrier, bool edge) {
    const int32_t box = copy_->box;
    const int32_t mine = boxes_per_warp(box);
    const int32_t tiles = 32 / mine;  // whose boxes the lanes know
    if (!Values && i % tiles == 0) {
      before_ = here_;
      here_ = find_boxes(i, box, mine);
    }
    // Values are a tile behind keys, whose lanes may know others by now.
    const bool is_before = Values && (i + 1) % tiles == 0 && i < last_index();
    const BoxPlace known = is_before ? before_ : here_;
    const int32_t base = i % tiles * mine;
    int32_t count = 0;
#pragma unroll 1
    for (int32_t b = 0; b < mine; ++b) count += __shfl_sync(kAllLanes, known.page, base + b) >= 0 ? 1 : 0;
    if (lane() == 0) {
      const auto bytes = static_cast<uint32_t>(count * box / kEight * eight_bytes(Dim));
      if (!edge) ptx::arrive(barrier, 31);
      ptx::arrive_expecting(barrier, bytes);
    }
    const uint64_t policy = ptx::evict_last_policy();
    const CUtensorMap* const map = Values ? &maps_->v : &maps_->k;
    const int32_t eights = Values ? copy_->v_eights : copy_->k_eights;
#pragma unroll 1
    for (int32_t b = 0; b < mine; ++b) {
      const int32_t page = __shfl_sync(kAllLanes, known.page, base + b);
      const int32_t in_page = __shfl_sync(kAllLanes, known.in_page, base + b);
      if (page < 0 || lane() != 0) continue;
      const int32_t number = warp() + kGroupWarps * b;
      ptx::copy_box_5d(to + static_cast<uint32_t>(number * box / kEight * eight_bytes(Dim)), map, barrier, 0, 0, 0, head_,
                       page * eights + in_page / kEight, policy);
    }
  }

  /// A box's page, or -1 where there is nothing to be read, and its first token in it.
  struct BoxPlace {
    int32_t page;
    int32_t in_page;
  };

  __device__ __forceinline__ int32_t last_index() const { return num_item_tiles_ - 1; }

  /// This lane's box of those of the next tiles from tile `i` on, `mine` a tile.
  __device__ __forceinline__ BoxPlace find_boxes(int32_t i, int32_t box, int32_t mine) const {
    const int32_t tile = last_tile_ - i - lane() / mine;
    const int32_t number = warp() + kGroupWarps * (lane() % mine);
    const int32_t token = tile * kTokens + number * box;
    if (number * box >= kTokens || token + box <= sight_.any_begin || token >= sight_.any_end) return {-1, 0};
    return place_of(token);
  }

  __device__ __forceinline__ BoxPlace place_of(int32_t token) const {
    const auto page_size = static_cast<uint32_t>(segment_->page_size);
    const uint32_t column = static_cast<uint32_t>(token) / page_size;
    return {pages_[column], static_cast<int32_t>(static_cast<uint32_t>(token) - column * page_size)};
  }

  /// Begins the copies of a tile by threads: a warp has 32 tokens, each lane knows where one of them lies. Zeros for
  /// tokens that no row sees.
  template <int32_t Dim, bool Values>
  __device__ __forceinline__ void copy_tokens(int32_t first, uint32_t to) const {
    constexpr int32_t kPieces = Dim / kPiece;
    const KvStrides& strides = Values ? segment_->v_strides : segment_->k_strides;
    const void* const data = Values ? segment_->v : segment_->k;
    const int32_t mine = first + thread_;
    int64_t begin = -1;
    if (mine >= sight_.any_begin && mine < sight_.any_end) {
      begin = head_ * strides.head;
      if (pages_ == nullptr) {
        begin += (int64_t{first_token_} + mine) * strides.token;
      } else {
        const BoxPlace place = place_of(mine);
        begin += place.page * strides.page + place.in_page * strides.token;
      }
    }
#pragma unroll 2
    for (int32_t i = lane(); i < 32 * kPieces; i += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, i / kPieces);
      const uint32_t target =
          to + static_cast<uint32_t>(tile_offset(Dim, 32 * warp() + i / kPieces, i % kPieces));
      const int64_t from = at < 0 ? 0 : at + i % kPieces * kPiece;
      if (copy_->direct) {
        ptx::copy_16_async(target, static_cast<const T*>(data) + from, at >= 0);
      } else {
        copy_any<T>(target, data, segment_->dtype, from, at >= 0);
      }
    }
  }

  const PrefillParams& params_;
  SharedState& state_;
  const uint32_t memory_;
  const uint32_t full_;
  const uint32_t empty_;
  const int32_t thread_;
  int32_t num_items_ = 0;
  int32_t num_tiles_ = 0;
  int32_t num_edges_ = 0;
  // Of the item:
  const SegmentParams* segment_ = nullptr;
  const PrefillParams::Maps* maps_ = nullptr;
  const SegmentCopy* copy_ = nullptr;
  const int32_t* pages_ = nullptr;  ///< null: ragged
  Sight sight_{};
  bool custom_ = false;
  int32_t head_ = 0;
  int32_t last_tile_ = 0;
  int32_t num_item_tiles_ = 0;
  int32_t first_token_ = 0;
  BoxPlace here_{};    ///< of the tiles whose keys come next
  BoxPlace before_{};  ///< of those before them
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
