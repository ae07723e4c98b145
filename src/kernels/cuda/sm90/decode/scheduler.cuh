#pragma once

#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/common/tile_scheduler.cuh"
#include "kernels/cuda/sm90/decode/producer.cuh"
#include "scheduler/mask_bounds.hpp"

/// The scheduler warp. It fetches work tiles, computes the mask bounds of their rows, locates their tokens and copies
/// their queries, one tile batch ahead of the consumer warps. So these never wait for lengths, page tables or queries.
namespace folio::inline v0::kernels::cuda::sm90::decode {

template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
class TileFetcher {
  static constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8), kRows};
  static constexpr SmemLayout kLayout = smem_layout(kDims);
  static constexpr int32_t kPlaces = batch_places(kDims);
  using Storage = SharedStorage<consumer_warps(kDims), stages(kDims)>;

 public:
  __device__ __forceinline__ TileFetcher(const DecodeParams& params, unsigned char* smem, Storage& storage)
      : params_(params.attention),
        copy_tokens_(params.copy_tokens),
        indptr_(params.attention, static_cast<int32_t>(threadIdx.x) % 32),
        plan_(params.attention.plan->view),
        storage_(storage),
        places_(reinterpret_cast<TokenPlace*>(smem + kLayout.places)),
        batch_full_(ptx::shared_address(storage.batch_full)),
        batch_empty_(ptx::shared_address(storage.batch_empty)),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        queries_(params.attention, ptx::shared_address(smem + kLayout.queries), lane_) {
    if (plan_.num_segments > 0) first_segment_ = plan_.segments[0];
  }

  __device__ __forceinline__ void run() {
    const int32_t first_ctas = params_.other_plan == nullptr ? plan_.num_workers : first_decode_ctas(params_);
    const bool is_first = static_cast<int32_t>(blockIdx.x) < first_ctas;
    storage_.first_ctas = first_ctas;
    __syncwarp();
    const DynamicTileScheduler tile_scheduler(plan_, params_.tile_counters, storage_.first_ctas);
    // The next work tile is claimed once this one is committed. The consumers' batches hide the latency from the claim
    // to the pages, and no CTA holds more than it will compute soon.
    constexpr int32_t kUnclaimed = -2;  // so that claiming stands in one place: short batches fetch all code anew
    int32_t index = is_first ? tile_scheduler.initial_work_tile() : kUnclaimed;
    for (;;) {
      if (index == kUnclaimed) index = tile_scheduler.claim_work_tile();
      if (index < 0) break;
      const scheduler::WorkTile tile = plan_.work_tiles[index];
      produce(tile);
      ++num_work_tiles_;
      index = (tile.flags & scheduler::kFinish) == 0 ? tile.partial : kUnclaimed;
    }
    tile_scheduler.finish();
    const int32_t stage = producer_acquire();
    if (lane_ == 0) storage_.batches[stage].flags = kNoMoreWork;
    producer_commit(stage);
  }

 private:
  static constexpr int32_t kEarly = 2;   ///< places per lane that are located before the mask bounds are known
  static constexpr int32_t kUnroll = 4;  ///< places per lane located at once after that; a batch of kCpAsync has 32

  /// A lane's row.
  struct Row {
    int64_t mask_bit = 0;
    int32_t mask_begin = INT32_MAX;
    int32_t position = 0;
    int32_t begin = 0;
    int32_t end = 0;
    float scale = 0.0f;
    float slope = 0.0f;
    float v_scale = 1.0f;
    int64_t query = -1;  ///< see QueryProducer
  };

  /// A work tile's row of its segment.
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

  __device__ __forceinline__ KvRow kv_row_of(const scheduler::WorkTile& tile) const {
    KvRow kv_row{first_segment_, 0, 0};
    if (tile.segment != 0) kv_row.lengths = plan_.segments[tile.segment];
    kv_row.kv_len = kv_row.lengths.kv_len[tile.kv_row];
    kv_row.first_pos = kv_row.lengths.first_pos[tile.kv_row];
    return kv_row;
  }

  /// Sets all of the lane's row but `query`. `request` is that of the work tile's first row.
  __device__ __forceinline__ void set_row(Row& row, const scheduler::WorkTile& tile, const KvRow& kv_row,
                                          Request request, bool custom) const {
    if (lane_ >= tile.row_end - tile.row_begin) return;
    const QueryRow q_row = query_row(params_, tile, lane_);
    const scheduler::SegmentLengths& lengths = kv_row.lengths;
    const SegmentParams& segment = params_.segments[tile.segment];
    int32_t r = tile.request;
    while (request.end_token <= q_row.token) {
      ++r;
      request = {request.end_token, plan_.cu_q[r + 1], plan_.q_first_pos[r]};
    }
    const int32_t index = q_row.token - request.first_token;
    const int64_t position = int64_t{request.first_position} + index;
    const scheduler::MaskBounds mask_bounds = scheduler::mask_bounds(params_.mask, lengths.mask);
    const scheduler::TokenRange range = scheduler::visible_to_token(
        {kv_row.first_pos, kv_row.kv_len, lengths.shard}, mask_bounds, plan_.visible_positions, q_row.token, position);
    row.position = static_cast<int32_t>(position);
    row.begin = static_cast<int32_t>(range.begin < tile.kv_begin ? tile.kv_begin : range.begin);
    row.end = static_cast<int32_t>(range.end > tile.kv_end ? tile.kv_end : range.end);
    if (row.begin >= row.end) row.begin = row.end = 0;
    if (custom) {
      row.mask_begin = plan_.mask_first_column[r] - lengths.key_offset[r];
      row.mask_bit = 8 * plan_.mask_byte_indptr[r] + int64_t{index} * plan_.mask_columns[r] - row.mask_begin;
    }
    const float q_scale = scale_at(params_.q_scale, r, tile.kv_head);
    const float k_scale = scale_at(segment.k_scale, r, tile.kv_head);
    const float scale = __fmul_rn(__fmul_rn(q_scale, k_scale), params_.sm_scale);
    row.scale = has_bias(params_) ? scale : __fmul_rn(scale, kLog2E);
    if (params_.alibi_slopes != nullptr) row.slope = params_.alibi_slopes[q_row.q_head];
    row.v_scale = scale_at(segment.v_scale, r, tile.kv_head);
  }

  /// Reduces the rows of all lanes.
  __device__ __forceinline__ VisibleRange visible_range_of(const Row& row, int32_t num_rows) const {
    const bool mine = lane_ < num_rows;
    const bool sees_any = mine && row.begin < row.end;
    return {__reduce_min_sync(kAllLanes, sees_any ? row.begin : INT32_MAX),
            __reduce_max_sync(kAllLanes, sees_any ? row.end : 0), __reduce_max_sync(kAllLanes, mine ? row.begin : 0),
            __reduce_min_sync(kAllLanes, mine ? row.end : INT32_MAX)};
  }

  /// Commits a work tile, in as many tile batches as it takes. A work tile without keys has one batch without tiles.
  __device__ __forceinline__ void produce(const scheduler::WorkTile& tile) {
    const bool has_keys = tile.kv_begin < tile.kv_end;
    const bool custom = has_keys && params_.mask.kind == MaskKind::kCustom &&
                        plan_.segments[tile.segment].mask == SegmentMask::kAsConfig;
    const int32_t num_rows = tile.row_end - tile.row_begin;
    const int32_t first = tile.kv_begin / kTileTokens * kTileTokens;
    const int32_t num_tiles = has_keys ? (tile.kv_end - first + kTileTokens - 1) / kTileTokens : 0;
    const int32_t copy_tokens = has_keys ? copy_tokens_[tile.segment] : kCpAsync;
    const int32_t context = num_work_tiles_ % kBatchStages;
    // Independent loads are issued together: lengths and the first pages before anything is computed from them. Later
    // loads wait behind the consumer warps' first KV copies.
    PageTableRow pages{};
    KvRow kv_row{};
    Request request{};
    TokenPlace early_places[kEarly] = {};
    if (has_keys) {
      kv_row = kv_row_of(tile);
      request = {plan_.cu_q[tile.request], plan_.cu_q[tile.request + 1], plan_.q_first_pos[tile.request]};
      pages = page_table_row(params_, tile, indptr_);
      pages.locate(first + lane_ * copy_tokens, 32 * copy_tokens, copy_tokens, early_places);
    }
    Row row;
    if (lane_ < num_rows) {
      const QueryRow q_row = query_row(params_, tile, lane_);
      row.query = q_row.token * params_.q_token_stride + q_row.q_head * params_.q_head_stride;
    }
    const bool early_queries = kFp8 == Fp8::kNone && queries_.is_direct() && num_batches_ < kBatchStages;
    if (early_queries) queries_.cp_async(context, row.query);
    if (has_keys) set_row(row, tile, kv_row, request, custom);
    const VisibleRange visible = visible_range_of(row, num_rows);
    pages.begin = visible.any_begin;
    pages.end = visible.any_end;
    int32_t done = 0;
    do {
      const int32_t stage = producer_acquire();
      if (done == 0) {
        if constexpr (kFp8 == Fp8::kNone) {
          if (!early_queries) queries_.copy(context, row.query);
        } else {
          queries_.convert(context, row.query, row.scale);
        }
        write_row(storage_.contexts[context], row);
        if (lane_ == 0) {
          write_work_tile(storage_.contexts[context], tile, kv_row, visible, first, copy_tokens, has_keys, custom);
        }
      }
      const int32_t count = min(num_tiles - done, batch_tiles(kPlaces, copy_tokens));
      const int32_t begin = first + done * kTileTokens;
      TokenPlace* const places = places_ + stage * kPlaces;
      const int32_t num_places = count * kTileTokens / copy_tokens;
      int32_t place = lane_;
      if (done == 0) {
#pragma unroll
        for (int32_t i = 0; i < kEarly; ++i, place += 32) {
          if (!pages.has(begin + place * copy_tokens, copy_tokens)) early_places[i] = {0, -1};
          if (place < num_places) places[place] = early_places[i];
        }
      }
#pragma unroll 1
      for (; place < num_places; place += 32 * kUnroll) {
        TokenPlace several[kUnroll];
        pages.locate(begin + place * copy_tokens, 32 * copy_tokens, copy_tokens, several);
#pragma unroll
        for (int32_t i = 0; i < kUnroll; ++i) {
          if (place + 32 * i < num_places) places[place + 32 * i] = several[i];
        }
      }
      done += count;
      if (lane_ == 0) storage_.batches[stage] = {context, begin, count, done == num_tiles ? uint32_t{kLastBatch} : 0u};
      producer_commit(stage);
    } while (done < num_tiles);
  }

  /// The lane's row.
  __device__ __forceinline__ void write_row(WorkTileContext& context, const Row& row) const {
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

  /// Everything but the rows, by one lane.
  __device__ __forceinline__ void write_work_tile(WorkTileContext& context, const scheduler::WorkTile& tile,
                                                  const KvRow& kv_row, const VisibleRange& visible, int32_t first,
                                                  int32_t copy_tokens, bool has_keys, bool custom) const {
    context.work_tile = tile;
    context.visible = visible;
    context.num_rows = tile.row_end - tile.row_begin;
    context.first = first;
    context.copy_tokens = copy_tokens;
    context.custom = custom;
    context.has_keys = has_keys;
    if (!has_keys) return;
    context.shard = kv_row.lengths.shard;
    context.first_pos = kv_row.first_pos;
  }

  /// The next batch's stage, once the consumer warps have released it.
  __device__ __forceinline__ int32_t producer_acquire() const {
    const int32_t stage = num_batches_ % kBatchStages;
    const int32_t use = num_batches_ / kBatchStages;
    if (use > 0) ptx::mbarrier_wait(batch_empty_ + 8 * stage, (use - 1) & 1);
    return stage;
  }
  __device__ __forceinline__ void producer_commit(int32_t stage) {
    ptx::cp_async_mbarrier_arrive(batch_full_ + 8 * stage);
    ptx::mbarrier_arrive(batch_full_ + 8 * stage);
    ++num_batches_;
  }

  const AttentionParams& params_;
  const int32_t* copy_tokens_;
  const IndptrCache indptr_;
  const scheduler::PlanView plan_;  ///< a copy: one load brings all of its fields
  Storage& storage_;
  TokenPlace* const places_;
  const uint32_t batch_full_;
  const uint32_t batch_empty_;
  const int32_t lane_;
  const QueryProducer<T, DimQk, kFp8, kRows> queries_;
  scheduler::SegmentLengths first_segment_{};  ///< loaded beside the first work tile
  int32_t num_work_tiles_ = 0;
  int32_t num_batches_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
