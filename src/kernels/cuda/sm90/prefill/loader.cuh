#pragma once

#include "kernels/cuda/sm90/decode/item_queue.cuh"
#include "kernels/cuda/sm90/prefill/codes.cuh"
#include "kernels/cuda/sm90/prefill/edge_values.cuh"
#include "planner/partition_rule.hpp"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

/// The loading warpgroup: takes items, finds out what their rows see, and brings queries, keys and values to shared
/// memory, as far ahead of the math warpgroups as the ring has room. Keys and values of the type that products take;
/// see CodeLoader for fp8.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// `Sights`: math warpgroups are told of every row which of a tile's tokens it sees.
template <typename T, int32_t DimQk, int32_t DimV, bool Sights>
class Loader {
 protected:
  static constexpr HeadDims kDims{DimQk, DimV};
  static constexpr SharedLayout kLayout = shared_layout(kDims);
  static constexpr int32_t kTokens = tile_tokens(kDims);
  using Place = RingPlace<stages(kDims)>;

 public:
  __device__ __forceinline__ Loader(const PrefillParams& params, unsigned char* memory, SharedState& state)
      : params_(params),
        state_(state),
        memory_(ptx::shared_address(memory)),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() { run_as(*this); }

 protected:
  /// `self`: this, as the class whose deliver and load_tiles are to be called.
  template <typename Self>
  __device__ __forceinline__ void run_as(Self& self) {
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
      load_item(self, plan, item, slot);
    }
    if (threadIdx.x == 0) state_.contexts[num_items_ % kItems].all_done = true;
    hand_over(num_items_ % kItems);
    if (warp_ == 0) queue.finish();
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

  /// Index of the item after `item`: of the same accumulation, or the next claim's; -1: none. By one thread.
  __device__ __forceinline__ int32_t next_of(const planner::PlanView& plan, const planner::WorkItem& item) const {
    if ((item.flags & planner::kFinish) == 0) return item.partial;
    const uint32_t claim = static_cast<uint32_t>(plan.num_workers) + atomicAdd(params_.attention.claim_counters, 1u);
    return claim < static_cast<uint32_t>(plan.num_claims) ? static_cast<int32_t>(claim) : -1;
  }

  template <typename Self>
  __device__ __forceinline__ void load_item(Self& self, const planner::PlanView& plan, const planner::WorkItem& item,
                                            int32_t slot) {
    const AttentionParams& params = params_.attention;
    const bool has_keys = item.kv_begin < item.kv_end;
    const bool custom =
        has_keys && params.mask == MaskKind::kCustom && plan.segments[item.segment].mask == SegmentMask::kAsConfig;
    const int32_t num_rows = item.row_end - item.row_begin;
    query_ = bind_row(plan, item, num_rows, has_keys, custom, state_.rows[slot]);
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
    if (!Self::kQueriesLate || num_tiles == 0) self.deliver(slot);
    if (num_tiles == 0) return;
    const Tiles tiles(first_tile + num_tiles - 1, num_tiles, sight, custom);
    const SegmentParams& segment = params.segments[item.segment];
    const int32_t* const pages =
        !segment.paged
            ? nullptr
            : segment.indices + (segment.indptr != nullptr ? int64_t{segment.indptr[item.kv_row]}
                                                           : item.kv_row * segment.row_stride + segment.first_column);
    self.load_tiles(tiles, segment, copy, pages, item);
  }

  __device__ __forceinline__ void load_tiles(const Tiles& tiles, const SegmentParams& segment, const SegmentCopy& copy,
                                             const int32_t* pages, const planner::WorkItem& item) {
    if (copy.box == 0) {
      load_by_threads(tiles, segment, copy, pages, item);
    } else if (boxes_per_warp(copy.box, kTokens) == 1) {
      load_boxes<1>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    } else if (boxes_per_warp(copy.box, kTokens) == 2) {
      load_boxes<2>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    } else {
      load_boxes<4>(tiles, params_.maps[item.segment], copy, pages, item.kv_head);
    }
  }

  /// This thread's row: what it sees, to shared memory. Returns where its queries begin; -1: the item has no such row.
  __device__ __forceinline__ int64_t bind_row(const planner::PlanView& plan, const planner::WorkItem& item,
                                              int32_t num_rows, bool has_keys, bool custom, RowInfo& rows) const {
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

  /// Where shared memory has one place for queries, they come behind the item's first keys: the place is another
  /// item's until that is through.
  static constexpr bool kQueriesLate = query_places(kDims) < kItems;

  /// The item's queries, and with them all that was written of it.
  __device__ __forceinline__ void deliver(int32_t slot) const {
    if (kQueriesLate && num_items_ > 0) {
      const int32_t before = num_items_ - 1;
      ptx::wait(ptx::shared_address(state_.item_empty) + 8 * static_cast<uint32_t>(before % kItems),
                before / kItems & 1);
    }
    copy_queries(query_, slot % query_places(kDims));
    hand_over(slot);
  }

  /// The queries of a warp's rows, of which each lane knows where its own begin; zeros for rows that the item has not.
  __device__ __forceinline__ void copy_queries(int64_t query, int32_t place) const {
    constexpr int32_t kPieces = DimQk / kPiece;
    const uint32_t to = memory_ + static_cast<uint32_t>(kLayout.queries + place * kMathGroups * query_bytes(DimQk));
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

  /// What this thread has written of an item and its queries.
  __device__ __forceinline__ void hand_over(int32_t slot) const {
    const uint32_t barrier = ptx::shared_address(state_.item_full) + 8 * static_cast<uint32_t>(slot);
    ptx::arrive_after_copies(barrier);
    ptx::arrive(barrier);
  }

  /// The next stage of the ring, once it is free.
  struct Stage {
    uint32_t number;
    uint32_t tile;
    uint32_t full;
  };
  __device__ __forceinline__ Stage await_keys() {
    return await_stage<kLayout.keys, tile_bytes(kDims, DimQk)>(state_.keys, keys_);
  }
  __device__ __forceinline__ Stage await_values() {
    return await_stage<kLayout.values, tile_bytes(kDims, DimV)>(state_.values, values_);
  }
  template <int32_t Begin, int32_t Bytes>
  __device__ __forceinline__ Stage await_stage(const Ring& ring, Place& place) const {
    const Stage stage{place.stage, memory_ + Begin + place.stage * Bytes,
                      ptx::shared_address(ring.full) + 8 * place.stage};
    // Of a stage never used, the phase before the first counts as ended.
    ptx::wait(ptx::shared_address(ring.empty) + 8 * place.stage, place.parity ^ 1);
    place.step();
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
        const Stage stage = await_keys();
        if constexpr (Sights) describe_sight(tiles.first_token(i), stage.number);
        issue_boxes<DimQk, Mine, Sights>(stage.tile, stage.full, maps.k, box, keys, head, policy);
      }
      if (i == 0) {
        if constexpr (kQueriesLate) deliver(num_items_ % kItems);
        continue;
      }
      const Stage stage = await_values();
      const bool edge = tiles.is_edge(i - 1);
      const uint32_t barrier = edge ? ptx::shared_address(&state_.landed) : stage.full;
      issue_boxes<DimV, Mine, false>(stage.tile, barrier, maps.v, box, values, head, policy);
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
  /// `barrier`. `Lanes`: all lanes have written for it, and arrive.
  template <int32_t Dim, int32_t Mine, bool Lanes>
  __device__ __forceinline__ void issue_boxes(uint32_t tile, uint32_t barrier, const CUtensorMap& map, int32_t box,
                                              const int32_t (&at)[Mine], int32_t head, uint64_t policy) const {
    if (!ptx::elect()) {
      if constexpr (Lanes) ptx::arrive(barrier, kLaneArrivals);
      return;
    }
    const int32_t bytes = box * 2 * Dim;
    int32_t count = 0;
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) count += at[b] >= 0 ? 1 : 0;
    ptx::arrive(barrier, (Lanes ? 1 : 32) * kLaneArrivals - 1);
    ptx::arrive_expecting(barrier, static_cast<uint32_t>(count * bytes));
#pragma unroll
    for (int32_t b = 0; b < Mine; ++b) {
      if (at[b] < 0) continue;
      ptx::copy_box_5d(tile + static_cast<uint32_t>((warp_ + kGroupWarps * b) * bytes), &map, barrier, 0, 0, 0, head,
                       at[b], policy);
    }
  }

  /// Which tokens of the tile of keys that begins at `first` this thread's row sees.
  __device__ __forceinline__ void describe_sight(int32_t first, uint32_t stage) const {
    constexpr int32_t kWords = kTokens / 32;
    const auto row = static_cast<int32_t>(threadIdx.x);
    const RowInfo& rows = state_.rows[num_items_ % kItems];
    const uint32_t to =
        memory_ + static_cast<uint32_t>(kLayout.sights) + 4 * kWords * (stage * kRows + static_cast<uint32_t>(row));
#pragma unroll
    for (int32_t w = 0; w < kWords; ++w)
      ptx::store_4(to + 4 * w, sight_of(params_.attention, rows, row, first + 32 * w));
  }

  /// Values of tile `i`, which are there, before they are handed over.
  __device__ __forceinline__ void look_through_values(const Tiles& tiles, int32_t i, const Stage& stage) const {
    const int32_t first = tiles.first_token(i);
    const bool special = look_through<T, DimV, kTokens>(stage.tile, tiles.sight.any_begin - first,
                                                        tiles.sight.any_end - first, static_cast<int32_t>(threadIdx.x));
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
        const Stage stage = await_keys();
        if constexpr (Sights) describe_sight(tiles.first_token(i), stage.number);
        copy_tokens<DimQk>(tiles, i, stage.tile, segment.k, segment.dtype, segment.k_strides, head, copy, pages,
                           first_token);
        end_copies(stage, copy.direct);
      }
      if (i == 0) {
        if constexpr (kQueriesLate) deliver(num_items_ % kItems);
        continue;
      }
      const Stage stage = await_values();
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

  /// Where this lane's token of its warp's tokens of a tile begins; -1: no row sees it.
  __device__ __forceinline__ int64_t token_begin(const Tiles& tiles, int32_t i, const KvStrides& strides, int32_t head,
                                                 const SegmentCopy& copy, const int32_t* pages,
                                                 int32_t first_token) const {
    constexpr int32_t kMine = kTokens / kGroupWarps;
    const int32_t mine = tiles.first_token(i) + warp_ * kMine + lane_;
    if (lane_ >= kMine || mine < tiles.sight.any_begin || mine >= tiles.sight.any_end) return -1;
    const int64_t begin = head * strides.head;
    if (pages == nullptr) return begin + (int64_t{first_token} + mine) * strides.token;
    const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(mine));
    const uint32_t in_page = static_cast<uint32_t>(mine) - column * copy.page_size.divisor();
    return begin + pages[column] * strides.page + in_page * strides.token;
  }

  /// Begins the copies of a tile by threads. Zeros for tokens that no row sees.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_tokens(const Tiles& tiles, int32_t i, uint32_t tile, const void* data,
                                              DType dtype, const KvStrides& strides, int32_t head,
                                              const SegmentCopy& copy, const int32_t* pages,
                                              int32_t first_token) const {
    constexpr int32_t kPieces = Dim / kPiece;
    constexpr int32_t kMine = kTokens / kGroupWarps;
    const int64_t begin = token_begin(tiles, i, strides, head, copy, pages, first_token);
#pragma unroll 2
    for (int32_t n = lane_; n < kMine * kPieces; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n / kPieces);
      const uint32_t target = tile + static_cast<uint32_t>(tile_offset(Dim, kMine * warp_ + n / kPieces, n % kPieces));
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
  const int32_t warp_;
  const int32_t lane_;
  int32_t num_items_ = 0;
  int32_t num_edges_ = 0;
  int64_t query_ = -1;  ///< of this thread's row of the item
  Place keys_;          ///< the next
  Place values_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
