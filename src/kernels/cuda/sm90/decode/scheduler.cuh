#pragma once

#include "kernels/cuda/sm90/common/tile_scheduler.cuh"
#include "kernels/cuda/sm90/decode/copies.cuh"
#include "kernels/cuda/sm90/decode/page_walk.cuh"
#include "scheduler/mask_bounds.hpp"

/// The scheduler's warp: takes items, finds out what their rows see and where their tokens lie, and hands both over
/// with the queries, an entry ahead of the math warps. So those never wait for lengths, page tables or queries.
namespace folio::inline v0::kernels::cuda::sm90::decode {

template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
class Scheduler {
  static constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8)};
  static constexpr SharedLayout kLayout = shared_layout(kDims);
  using State = SharedState<math_warps(kDims), stages(kDims)>;

 public:
  __device__ __forceinline__ Scheduler(const DecodeParams& params, unsigned char* memory, State& state)
      : params_(params.attention),
        boxes_(params.box),
        row_begins_(params.attention, static_cast<int32_t>(threadIdx.x) % 32),
        plan_(params.attention.plan->view),
        state_(state),
        places_(reinterpret_cast<TokenPlace*>(memory + kLayout.places)),
        queries_(ptx::shared_address(memory + kLayout.queries)),
        full_(ptx::shared_address(state.full)),
        empty_(ptx::shared_address(state.empty)),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {
    if (plan_.num_segments > 0) first_segment_ = plan_.segments[0];
  }

  __device__ __forceinline__ void run() {
    const DynamicTileScheduler queue(plan_, params_.tile_counters);
    // What comes next is claimed when an item has been handed over: the way from a claim to its pages is hidden behind
    // the entries that the math warps still have, and nobody holds more than it will soon compute.
    for (int32_t index = queue.initial_work_tile(); index >= 0;) {
      const scheduler::WorkTile item = plan_.work_tiles[index];
      publish(item);
      ++num_items_;
      index = queue.next_work_tile(item);
    }
    queue.finish();
    const int32_t slot = await_slot();
    if (lane_ == 0) state_.entries[slot].flags = kAllDone;
    hand_over(slot);
  }

 private:
  static constexpr int32_t kAhead = 2;   ///< places of a lane that are looked up before it is known what is seen
  static constexpr int32_t kAtOnce = 4;  ///< ... after it, at once: an entry of single tokens has 32

  /// What a lane knows of its row.
  struct Row {
    int64_t mask_bit = 0;
    int32_t mask_begin = INT32_MAX;
    int32_t position = 0;
    int32_t begin = 0;
    int32_t end = 0;
    float scale = 0.0f;
    float slope = 0.0f;
    float v_scale = 1.0f;
    int64_t query = -1;  ///< where its queries begin, in elements
  };

  /// An item's row of its segment.
  struct KvRow {
    scheduler::SegmentLengths lengths;
    int32_t kv_len;
    int32_t first_pos;
  };

  /// A request's tokens.
  struct Request {
    int32_t first_token;
    int32_t end_token;
    int32_t first_position;
  };

  __device__ __forceinline__ KvRow kv_row_of(const scheduler::WorkTile& item) const {
    KvRow kv_row{first_segment_, 0, 0};
    if (item.segment != 0) kv_row.lengths = plan_.segments[item.segment];
    kv_row.kv_len = kv_row.lengths.kv_len[item.kv_row];
    kv_row.first_pos = kv_row.lengths.first_pos[item.kv_row];
    return kv_row;
  }

  /// `row` knows its queries already.
  __device__ __forceinline__ void bind_row(Row& row, const scheduler::WorkTile& item, const KvRow& kv_row,
                                           Request asked, bool custom) const {
    if (lane_ >= item.row_end - item.row_begin) return;
    const RowPlace place = row_place(params_, item, lane_);
    const scheduler::SegmentLengths& lengths = kv_row.lengths;
    const SegmentParams& segment = params_.segments[item.segment];
    int32_t request = item.request;
    while (asked.end_token <= place.token) {
      ++request;
      asked = {asked.end_token, plan_.cu_q[request + 1], plan_.q_first_pos[request]};
    }
    const int32_t index = place.token - asked.first_token;
    const int64_t position = int64_t{asked.first_position} + index;
    const scheduler::MaskBounds mask_bounds =
        scheduler::mask_bounds(params_.mask, lengths.mask, params_.window_left, params_.window_right);
    const scheduler::TokenRange range =
        scheduler::visible_range({kv_row.first_pos, kv_row.kv_len, lengths.shard}, mask_bounds, position);
    row.position = static_cast<int32_t>(position);
    row.begin = static_cast<int32_t>(range.begin < item.kv_begin ? item.kv_begin : range.begin);
    row.end = static_cast<int32_t>(range.end > item.kv_end ? item.kv_end : range.end);
    if (row.begin >= row.end) row.begin = row.end = 0;
    if (custom) {
      row.mask_begin = plan_.mask_first_column[request] - lengths.key_offset[request];
      row.mask_bit =
          8 * plan_.mask_byte_indptr[request] + int64_t{index} * plan_.mask_columns[request] - row.mask_begin;
    }
    const float q_scale = scale_at(params_.q_scale, request, item.kv_head);
    const float k_scale = scale_at(segment.k_scale, request, item.kv_head);
    const float scale = __fmul_rn(__fmul_rn(q_scale, k_scale), params_.sm_scale);
    row.scale = has_bias(params_) ? scale : __fmul_rn(scale, kLog2E);
    if (params_.alibi_slopes != nullptr) row.slope = params_.alibi_slopes[place.q_head];
    row.v_scale = scale_at(segment.v_scale, request, item.kv_head);
  }

  __device__ __forceinline__ Sight sight_of(const Row& row, int32_t num_rows) const {
    const bool mine = lane_ < num_rows;
    const bool sees = mine && row.begin < row.end;
    return {__reduce_min_sync(kAllLanes, sees ? row.begin : INT32_MAX),
            __reduce_max_sync(kAllLanes, sees ? row.end : 0), __reduce_max_sync(kAllLanes, mine ? row.begin : 0),
            __reduce_min_sync(kAllLanes, mine ? row.end : INT32_MAX)};
  }

  /// Hands an item over, in as many entries as it takes.
  __device__ __forceinline__ void publish(const scheduler::WorkTile& item) {
    const bool has_keys = item.kv_begin < item.kv_end;
    const bool custom =
        has_keys && params_.mask == MaskKind::kCustom && plan_.segments[item.segment].mask == SegmentMask::kAsConfig;
    const int32_t num_rows = item.row_end - item.row_begin;
    const int32_t first = item.kv_begin / kTileTokens * kTileTokens;
    const int32_t num_tiles = has_keys ? (item.kv_end - first + kTileTokens - 1) / kTileTokens : 0;
    const int32_t box = has_keys ? boxes_[item.segment] : kSingles;
    const int32_t context = num_items_ % kEntries;
    // Nothing waits that need not: lengths and the first pages, by the item's range, are asked for before anything is
    // computed. Soon after, all that is read waits behind the math warps' first copies.
    PageWalk walk{};
    KvRow kv_row{};
    Request asked{};
    TokenPlace ahead[kAhead] = {};
    if (has_keys) {
      kv_row = kv_row_of(item);
      asked = {plan_.cu_q[item.request], plan_.cu_q[item.request + 1], plan_.q_first_pos[item.request]};
      walk = page_walk(params_, item, row_begins_);
      walk.find(first + lane_ * box, 32 * box, box, ahead);
    }
    Row row;
    if (lane_ < num_rows) {
      const RowPlace place = row_place(params_, item, lane_);
      row.query = place.token * params_.q_token_stride + place.q_head * params_.q_head_stride;
    }
    const bool early = kFp8 == Fp8::kNone && directly() && num_entries_ < kEntries;
    if (early) ask_for_queries(context, row);
    if (has_keys) bind_row(row, item, kv_row, asked, custom);
    const Sight sight = sight_of(row, num_rows);
    walk.begin = sight.any_begin;
    walk.end = sight.any_end;
    int32_t done = 0;
    do {
      const int32_t slot = await_slot();
      if (done == 0) {
        if constexpr (kFp8 == Fp8::kNone) {
          if (!early) copy_queries(context, row);
        } else {
          convert_queries(context, row);
        }
        write_row(state_.contexts[context], row);
        if (lane_ == 0) write_item(state_.contexts[context], item, kv_row, sight, first, box, has_keys, custom);
      }
      const int32_t count = min(num_tiles - done, entry_tiles(kDims));
      const int32_t begin = first + done * kTileTokens;
      TokenPlace* const places = places_ + slot * entry_tiles(kDims) * kTileTokens;
      const int32_t num_places = count * kTileTokens / box;
      int32_t place = lane_;
      if (done == 0) {
#pragma unroll
        for (int32_t i = 0; i < kAhead; ++i, place += 32) {
          if (!walk.has(begin + place * box, box)) ahead[i] = {0, -1};
          if (place < num_places) places[place] = ahead[i];
        }
      }
#pragma unroll 1
      for (; place < num_places; place += 32 * kAtOnce) {
        TokenPlace several[kAtOnce];
        walk.find(begin + place * box, 32 * box, box, several);
#pragma unroll
        for (int32_t i = 0; i < kAtOnce; ++i) {
          if (place + 32 * i < num_places) places[place + 32 * i] = several[i];
        }
      }
      done += count;
      if (lane_ == 0) state_.entries[slot] = {context, begin, count, done == num_tiles ? uint32_t{kItemEnds} : 0u};
      hand_over(slot);
    } while (done < num_tiles);
  }

  /// A lane's row.
  __device__ __forceinline__ void write_row(ItemContext& context, const Row& row) const {
    if (lane_ >= kMaxRows) return;
    context.mask_bit[lane_] = row.mask_bit;
    context.mask_begin[lane_] = row.mask_begin;
    context.position[lane_] = row.position;
    context.visible_begin[lane_] = row.begin;
    context.visible_end[lane_] = row.end;
    context.scale[lane_] = row.scale;
    context.slope[lane_] = row.slope;
    context.v_scale[lane_] = row.v_scale;
  }

  /// What is known of the whole item, by one lane.
  __device__ __forceinline__ void write_item(ItemContext& context, const scheduler::WorkTile& item, const KvRow& kv_row,
                                             const Sight& sight, int32_t first, int32_t box, bool has_keys,
                                             bool custom) const {
    context.item = item;
    context.sight = sight;
    context.num_rows = item.row_end - item.row_begin;
    context.first = first;
    context.box = box;
    context.custom = custom;
    context.has_keys = has_keys;
    if (!has_keys) return;
    context.shard = kv_row.lengths.shard;
    context.first_pos = kv_row.first_pos;
  }

  /// Calls copy(shared address, element, valid) for the pieces of kRows rows' queries, of which the item may have
  /// fewer.
  template <int32_t kAtOnce, typename Copy>
  __device__ __forceinline__ void for_query_pieces(int32_t context, const Row& row, const Copy& copy) const {
    constexpr int32_t kPieces = DimQk / kPiece;
    const uint32_t to = queries_ + static_cast<uint32_t>(context * kMaxRows * query_stride(kDims));
#pragma unroll kAtOnce
    for (int32_t i = lane_; i < kRows * kPieces; i += 32) {
      const int32_t d = i % kPieces * kPiece;
      const int64_t at = __shfl_sync(kAllLanes, row.query, i / kPieces);
      const bool valid = at >= 0 && d < params_.head_dim_qk;
      copy(to + static_cast<uint32_t>(i / kPieces * query_stride(kDims) + 2 * d), at + d, valid);
    }
  }
  /// Whether queries can be copied as they are, by pieces.
  __device__ __forceinline__ bool directly() const {
    return params_.q_wide && !is_fp8(params_.q_dtype);
  }
  __device__ __forceinline__ void ask_for_queries(int32_t context, const Row& row) const {
    for_query_pieces<4>(context, row, [this](uint32_t to, int64_t at, bool valid) {
      ptx::cp_async_16(to, static_cast<const uint16_t*>(params_.q) + (valid ? at : 0), valid);
    });
  }
  __device__ __forceinline__ void copy_queries(int32_t context, const Row& row) const {
    if (directly()) return ask_for_queries(context, row);
    for_query_pieces<1>(context, row,
                        [this](uint32_t to, int64_t at, bool valid) { copy_query_piece<T>(params_, to, at, valid); });
  }

  /// The same as float16, where keys are codes: bfloat16's largest power of two becomes 2^14, so that what is 2^-28 of
  /// it or more stays exact, and the row's scale takes the difference.
  __device__ __forceinline__ void convert_queries(int32_t context, Row& row) const {
    constexpr int32_t kPairs = DimQk / 64;  // of a lane
    constexpr int32_t kTopExponent = 14;
    const uint32_t to = queries_ + static_cast<uint32_t>(context * kMaxRows * query_stride(kDims));
#pragma unroll 4
    for (int32_t r = 0; r < kRows; ++r) {
      const int64_t at = __shfl_sync(kAllLanes, row.query, r);
      uint32_t pairs[kPairs];
      uint32_t most = 0;
#pragma unroll
      for (int32_t i = 0; i < kPairs; ++i) {
        pairs[i] = at < 0 ? 0 : load_pair(at + 2 * (lane_ + 32 * i));
        most = max(most, magnitude(pairs[i]));
      }
      if (params_.q_dtype == DType::kBFloat16) {
        most = __reduce_max_sync(kAllLanes, most);
        const int32_t exponent =
            most == 0 ? 0 : min(max(static_cast<int32_t>(most >> 7) - 127 - kTopExponent, -120), 120);
        const float scale = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
#pragma unroll
        for (int32_t i = 0; i < kPairs; ++i) {
          pairs[i] = ptx::pack_two<__half>(__uint_as_float(pairs[i] << 16) * scale,
                                           __uint_as_float(pairs[i] & 0xffff0000u) * scale);
        }
        if (lane_ == r) row.scale *= __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
      }
#pragma unroll
      for (int32_t i = 0; i < kPairs; ++i) {
        ptx::st_shared_4(to + static_cast<uint32_t>(r * query_stride(kDims) + 4 * (lane_ + 32 * i)), pairs[i]);
      }
    }
  }

  /// Two neighbouring queries in the 16-bit type that they have; fp8 ones as float16.
  __device__ __forceinline__ uint32_t load_pair(int64_t at) const {
    if (is_fp8(params_.q_dtype)) {
      const auto* const from = static_cast<const uint8_t*>(params_.q) + at;
      return upcast_fp8x2<__half>(from[0] | uint32_t{from[1]} << 8,
                                  params_.q_dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3);
    }
    const auto* const from = static_cast<const uint16_t*>(params_.q) + at;
    if (params_.q_wide) return *reinterpret_cast<const uint32_t*>(from);
    return from[0] | uint32_t{from[1]} << 16;
  }

  /// Magnitude bits of the larger of two bfloat16; infinities and NaN count as 0.
  __device__ __forceinline__ static uint32_t magnitude(uint32_t pair) {
    const uint32_t low = pair & 0x7fffu;
    const uint32_t high = pair >> 16 & 0x7fffu;
    return max(low < 0x7f80u ? low : 0u, high < 0x7f80u ? high : 0u);
  }

  /// The next entry's slot, once the math warps have done with what it held.
  __device__ __forceinline__ int32_t await_slot() const {
    const int32_t slot = num_entries_ % kEntries;
    const int32_t use = num_entries_ / kEntries;
    if (use > 0) ptx::mbarrier_wait(empty_ + 8 * slot, (use - 1) & 1);
    return slot;
  }
  __device__ __forceinline__ void hand_over(int32_t slot) {
    ptx::cp_async_mbarrier_arrive(full_ + 8 * slot);
    ptx::mbarrier_arrive(full_ + 8 * slot);
    ++num_entries_;
  }

  const AttentionParams& params_;
  const int32_t* boxes_;
  const RowBegins row_begins_;
  const scheduler::PlanView plan_;  ///< a copy: its fields come together
  State& state_;
  TokenPlace* const places_;
  const uint32_t queries_;
  const uint32_t full_;
  const uint32_t empty_;
  const int32_t lane_;
  scheduler::SegmentLengths first_segment_{};  ///< asked for beside the first item
  int32_t num_items_ = 0;
  int32_t num_entries_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
