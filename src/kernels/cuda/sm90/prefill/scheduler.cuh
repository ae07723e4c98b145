#pragma once

#include "kernels/cuda/sm90/common/copy.cuh"
#include "kernels/cuda/sm90/common/tile_scheduler.cuh"
#include "kernels/cuda/sm90/prefill/mask.cuh"
#include "ptx/tma.cuh"
#include "scheduler/mask_bounds.hpp"

/// The tile scheduler's part in the kernel: how fetch warps of the producer warpgroup fetch the next work tile, bind
/// its rows and load its Q. That takes some 8,000 cycles, most of them waits for global memory. Each step uses what the
/// one before has loaded.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Upcasts eight fp8 values to shared memory.
template <typename T>
__device__ __forceinline__ void store_upcast_fp8x8(uint32_t smem, uint2 fp8, DType dtype) {
  const __nv_fp8_interpretation_t kind = dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3;
  ptx::st_shared_16(smem, uint4{upcast_fp8x2<T>(fp8.x & 0xffffu, kind), upcast_fp8x2<T>(fp8.x >> 16, kind),
                                upcast_fp8x2<T>(fp8.y & 0xffffu, kind), upcast_fp8x2<T>(fp8.y >> 16, kind)});
}

/// The producer warpgroup's base: its last `FetchWarps` warps fetch work tiles. Fetch thread t has rows t, t +
/// kFetchThreads, ... See Producer::prefetch_next_tile for the order of the steps.
template <typename T, int32_t DimQk, int32_t DimV, Variant kVariant, int32_t FetchWarps>
class TileFetcher {
 protected:
  static constexpr int32_t kFetchThreads = 32 * FetchWarps;
  static constexpr int32_t kLoadWarps =
      FetchWarps == kWarpgroupWarps ? kWarpgroupWarps : kWarpgroupWarps - FetchWarps;  ///< issue TMA of K and V
  static constexpr int32_t kRows = kBlockM / kFetchThreads;                            ///< of a fetch thread
  static constexpr HeadDims kDims{DimQk, DimV};
  static constexpr SmemLayout kLayout = smem_layout(kDims);
  static constexpr int32_t kBlockN = block_n(kDims);
  static constexpr int32_t kWorkTileWords = sizeof(scheduler::WorkTile) / 4;
  static_assert(kWorkTileWords <= 32);

  __device__ __forceinline__ TileFetcher(const PrefillParams& params, unsigned char* memory, SharedStorage& storage)
      : params_(params),
        storage_(storage),
        memory_(ptx::shared_address(memory)),
        warp_(__shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      q_offset_[r] = -1;
      slope_[r] = 0.0f;
    }
  }

  /// Number among the fetch warps; negative: it is none.
  __device__ __forceinline__ int32_t fetch_warp() const {
    return warp_ - (kWarpgroupWarps - FetchWarps);
  }
  __device__ __forceinline__ int32_t fetch_thread() const {
    return 32 * fetch_warp() + lane_;
  }
  /// Row `r` of this fetch thread.
  __device__ __forceinline__ int32_t row_of(int32_t r) const {
    return fetch_thread() + r * kFetchThreads;
  }

  /// Before the first work tile. Beside a decode pass, only some CTAs have work tiles.
  __device__ __forceinline__ void count_ctas() const {
    if (fetch_warp() != 0) return;
    const AttentionParams& params = params_.attention;
    const scheduler::PlanView& plan = params.plan->view;
    int32_t ctas = plan.num_workers;
    if (params.other_plan != nullptr) [[unlikely]]
      ctas = prefill_ctas(params, plan, params.other_plan->view);
    if (lane_ == 0) storage_.num_ctas = static_cast<uint32_t>(ctas);
    __syncwarp();
  }

  /// Step 1: the first fetch warp requests work tile `number` of this CTA from the plan.
  __device__ __forceinline__ void request_tile(int32_t number) {
    if (fetch_warp() != 0) return;
    const scheduler::PlanView& plan = params_.attention.plan->view;
    int32_t index = continuation_;
    if (index < 0) {
      const uint32_t ctas = storage_.num_ctas;
      uint32_t tile = ctas + ticket_;
      if (number == 0) tile = blockIdx.x < ctas ? blockIdx.x : UINT32_MAX;
      index = tile < static_cast<uint32_t>(plan.num_dynamic_tiles) ? static_cast<int32_t>(tile) : -1;
    }
    index_ = __shfl_sync(kAllLanes, index, 0);
    // The load completes before step 2.
    if (index_ >= 0 && lane_ < kWorkTileWords)
      word_ = reinterpret_cast<const int32_t*>(plan.work_tiles + index_)[lane_];
  }

  /// The CTA has no more work tiles. By one warp.
  __device__ __forceinline__ void finish() const {
    const AttentionParams& params = params_.attention;
    DynamicTileScheduler(params.plan->view, params.tile_counters, params.plan->view.num_workers).finish();
  }

  /// Step 2: the work tile and its rows. Waits until the consumers have released the buffer's last work tile.
  __device__ __forceinline__ void receive_tile(int32_t number) {
    const int32_t tile_buffer = number % kTileBuffers;
    TileContext& context = storage_.contexts[tile_buffer];
    if (number >= kTileBuffers) store_output(number - kTileBuffers);
    if (fetch_warp() == 0) {
      __syncwarp();
      if (lane_ < kWorkTileWords) reinterpret_cast<int32_t*>(&context.work_tile)[lane_] = word_;
      if (lane_ == 0) storage_.next = index_;
      __syncwarp();
    }
    ptx::named_barrier_sync(kFetchBarrier, kFetchThreads);
    index_ = storage_.next;
    if (index_ < 0) return;
    const scheduler::WorkTile& work_tile = context.work_tile;
    if (fetch_thread() == 0) {
      continuation_ = (work_tile.flags & scheduler::kFinish) == 0 ? work_tile.partial : -1;  // of the same output tile
      if (continuation_ < 0) ticket_ = atomicAdd(params_.attention.tile_counters, 1u);  // completes before it is used
    }
    fetch_lengths(params_.attention.plan->view, work_tile);
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) q_offset_[r] = locate_row(work_tile, storage_.rows[tile_buffer], r);
  }

  /// Step 3: the visible ranges of this thread's rows, and by the first thread what all rows share.
  __device__ __forceinline__ void bind_rows(int32_t number) const {
    if (index_ < 0) return;
    const scheduler::PlanView& plan = params_.attention.plan->view;
    TileContext& context = storage_.contexts[number % kTileBuffers];
    RowInfo& rows = storage_.rows[number % kTileBuffers];
    const scheduler::WorkTile& work_tile = context.work_tile;
    const AttentionParams& params = params_.attention;
    const bool uses_custom_mask = has_custom_mask(plan, work_tile);
    CustomMask custom_mask{params.custom_mask, 0};
    if (has_visible_bits(kVariant) && uses_custom_mask) custom_mask.bytes = plan.mask_byte_indptr[plan.num_requests];
    int32_t lengths_of[kLengths];
#pragma unroll
    for (int32_t i = 0; i < kLengths; ++i) lengths_of[i] = __shfl_sync(kAllLanes, length_, i);
    const auto [cu_q, next_cu_q, q_first_pos, kv_len, first_pos, first_page, mask, world, rank, interleave] =
        lengths_of;
    const KvShard shard{world, rank, interleave};
    if (fetch_thread() == 0) {
      context.uses_custom_mask = uses_custom_mask;
      context.mask_bytes = custom_mask.bytes;
      if (has_keys(work_tile)) {
        const SegmentParams& segment = params.segments[work_tile.segment];
        context.shard = shard;
        context.first_pos = first_pos;
        context.pages = !segment.paged
                            ? nullptr
                            : segment.indices + (segment.indptr != nullptr
                                                     ? int64_t{first_page}
                                                     : work_tile.kv_row * segment.row_stride + segment.first_column);
      }
    }
    VisibleRange visible{INT32_MAX, 0, 0, INT32_MAX};
    int32_t unmasked_end = INT32_MAX;
    bool negate_scores = false;
#pragma unroll 1
    for (int32_t r = 0; r < kRows; ++r) {
      const int32_t row = row_of(r);
      int32_t begin = 0;
      int32_t end = 0;
      if (row < work_tile.row_end - work_tile.row_begin) {
        float scale = 0.0f;
        float v_scale = 1.0f;
        int32_t unmasked_end_of_row = INT32_MAX;
        if (has_keys(work_tile)) {
          const SegmentParams& segment = params.segments[work_tile.segment];
          const int32_t token = rows.token[row];
          int32_t request = work_tile.request;
          int32_t first_row = cu_q;
          int32_t row_end = next_cu_q;
          int32_t first_query = q_first_pos;
          while (row_end <= token) {
            first_row = row_end;
            ++request;
            row_end = plan.cu_q[request + 1];
            first_query = plan.q_first_pos[request];
          }
          const int32_t query = token - first_row;
          const int64_t position = int64_t{first_query} + query;
          const scheduler::MaskBounds mask_bounds = scheduler::mask_bounds(params.mask, static_cast<SegmentMask>(mask));
          const scheduler::TokenRange range = scheduler::visible_to_token({first_pos, kv_len, shard}, mask_bounds,
                                                                          plan.visible_positions, token, position);
          begin = static_cast<int32_t>(range.begin < work_tile.kv_begin ? work_tile.kv_begin : range.begin);
          end = static_cast<int32_t>(range.end > work_tile.kv_end ? work_tile.kv_end : range.end);
          if (begin >= end) begin = end = 0;
          rows.position[row] = static_cast<int32_t>(position);
          if (kVariant == Variant::kAlibi && position - first_pos < end) {  // see add_bias
            unmasked_end_of_row = max(static_cast<int32_t>(position - first_pos) + 1, 0);
          }
          rows.mask_begin[row] = INT32_MAX;
          if (uses_custom_mask) {
            const int32_t mask_begin =
                plan.mask_first_column[request] - plan.segments[work_tile.segment].key_offset[request];
            const int64_t mask_bit =
                8 * plan.mask_byte_indptr[request] + int64_t{query} * plan.mask_columns[request] - mask_begin;
            rows.mask_begin[row] = mask_begin;
            rows.mask_bit[row] = mask_bit;
            if constexpr (kVariant == Variant::kMask)
              unmasked_end_of_row = apply_custom_mask(custom_mask, mask_begin, mask_bit, begin, end);
          }
          scale = __fmul_rn(__fmul_rn(scale_at(params.q_scale, request, work_tile.kv_head),
                                      scale_at(segment.k_scale, request, work_tile.kv_head)),
                            params.sm_scale);
          scale = __fmul_rn(scale, kLog2E);
          v_scale = scale_at(segment.v_scale, request, work_tile.kv_head);
        }
        rows.scale[row] = scale;
        if constexpr (kVariant == Variant::kAlibi) {
          float slope = slope_[0];
#pragma unroll
          for (int32_t i = 1; i < kRows; ++i) slope = r == i ? slope_[i] : slope;
          rows.slope[row] = __fmul_rn(slope, kLog2E);
        }
        negate_scores = negate_scores || !(scale >= kMinScaleAsIs);
        rows.v_scale[row] = v_scale;
        if (begin < end) {
          visible.any_begin = min(visible.any_begin, begin);
          visible.any_end = max(visible.any_end, end);
        }
        visible.all_begin = max(visible.all_begin, begin);
        visible.all_end = min(visible.all_end, end);
        unmasked_end = min(unmasked_end, min(unmasked_end_of_row, end));
        if constexpr (kVariant == Variant::kMask) visible.all_end = unmasked_end;
      }
      rows.visible_begin[row] = begin;
      rows.visible_end[row] = end;
    }
    visible.any_begin = __reduce_min_sync(kAllLanes, visible.any_begin);
    visible.any_end = __reduce_max_sync(kAllLanes, visible.any_end);
    visible.all_begin = __reduce_max_sync(kAllLanes, visible.all_begin);
    visible.all_end = __reduce_min_sync(kAllLanes, visible.all_end);
    if constexpr (kVariant == Variant::kAlibi) unmasked_end = __reduce_min_sync(kAllLanes, unmasked_end);
    negate_scores = __any_sync(kAllLanes, negate_scores);
    if (lane_ == 0) {
      storage_.visible_of_warp[fetch_warp()] = visible;
      storage_.negate_scores[fetch_warp()] = negate_scores;
      if constexpr (kVariant == Variant::kAlibi) storage_.unmasked_end[fetch_warp()] = unmasked_end;
    }
  }

  /// Narrows the range [begin, end) of a row to the tokens from the first to the last that it sees by its custom mask.
  /// Returns the end of those that it sees from `begin` on. So tiles that no row sees are not loaded, and those that
  /// all rows see take no bits. `mask_begin`: the first token that the mask has a bit for, mask_bit + mask_begin.
  __device__ __forceinline__ static int32_t apply_custom_mask(const CustomMask& mask, int32_t mask_begin,
                                                              int64_t mask_bit, int32_t& begin, int32_t& end) {
    const int32_t masked = max(begin, mask_begin);
    if (masked >= end) return end;
    end = masked + end_of_mask_bits(mask, mask_bit + masked, end - masked);
    if (begin == masked) begin += first_mask_bit(mask, mask_bit + masked, end - masked, true);
    if (begin >= end) begin = end = 0;
    const int32_t from = max(begin, masked);
    return from >= end ? end : from + first_mask_bit(mask, mask_bit + from, end - from, false);
  }

  /// Step 4: what the consumers need to know of the work tile as a whole.
  __device__ __forceinline__ void publish_tile(int32_t number) {
    const int32_t tile_buffer = number % kTileBuffers;
    if (index_ < 0) {
      if (fetch_thread() == 0) storage_.contexts[tile_buffer].all_done = true;
      commit_work_tile(tile_buffer);
    } else {
      ptx::tma_store_wait_read();
      ptx::named_barrier_sync(kFetchBarrier, kFetchThreads);  // TMA no longer reads Q's memory
      if (fetch_thread() == 0) describe_tile(storage_.contexts[tile_buffer]);
    }
    if constexpr (FetchWarps < kWarpgroupWarps) ptx::mbarrier_arrive(described_barrier(tile_buffer));
  }
  __device__ __forceinline__ uint32_t described_barrier(int32_t tile_buffer) const {
    return ptx::shared_address(storage_.tile_described) + 8 * static_cast<uint32_t>(tile_buffer);
  }

 private:
  __device__ __forceinline__ static bool has_keys(const scheduler::WorkTile& work_tile) {
    return work_tile.kv_begin < work_tile.kv_end;
  }
  /// Whether the bits of the custom mask apply.
  __device__ __forceinline__ bool has_custom_mask(const scheduler::PlanView& plan,
                                                  const scheduler::WorkTile& work_tile) const {
    return params_.attention.mask.kind == MaskKind::kCustom && has_keys(work_tile) &&
           plan.segments[work_tile.segment].mask == SegmentMask::kAsConfig;
  }

  /// Loads what bind_rows needs to know of the work tile's first request and of its segment, a word a lane. The loads
  /// complete before step 3.
  __device__ __forceinline__ void fetch_lengths(const scheduler::PlanView& plan, const scheduler::WorkTile& work_tile) {
    if (!has_keys(work_tile)) return;
    const scheduler::SegmentLengths& lengths = plan.segments[work_tile.segment];
    static_assert(sizeof(KvShard) == 12 && sizeof(SegmentMask) == 4);
    const auto* const shard = reinterpret_cast<const int32_t*>(&lengths.shard);
    const int32_t* const indptr = params_.attention.segments[work_tile.segment].indptr;
    if (lane_ >= kLengths || (lane_ == kFirstPage && indptr == nullptr)) return;
    const int32_t* const from[kLengths] = {plan.cu_q + work_tile.request,
                                           plan.cu_q + work_tile.request + 1,
                                           plan.q_first_pos + work_tile.request,
                                           lengths.kv_len + work_tile.kv_row,
                                           lengths.first_pos + work_tile.kv_row,
                                           indptr == nullptr ? nullptr : indptr + work_tile.kv_row,
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
  __device__ __forceinline__ void describe_tile(TileContext& context) const {
    const scheduler::WorkTile& work_tile = context.work_tile;
    const bool any_keys = has_keys(work_tile);
    VisibleRange visible = storage_.visible_of_warp[0];
#pragma unroll
    for (int32_t w = 1; w < FetchWarps; ++w) {
      const VisibleRange other = storage_.visible_of_warp[w];
      visible.any_begin = min(visible.any_begin, other.any_begin);
      visible.any_end = max(visible.any_end, other.any_end);
      visible.all_begin = max(visible.all_begin, other.all_begin);
      visible.all_end = min(visible.all_end, other.all_end);
    }
    if (kVariant == Variant::kAny && context.uses_custom_mask) visible.all_end = 0;  // of any token, some row may not
    context.visible = visible;
    int32_t unmasked_end = storage_.unmasked_end[0];
    bool negate_scores = storage_.negate_scores[0];
#pragma unroll
    for (int32_t w = 1; w < FetchWarps; ++w) {
      unmasked_end = min(unmasked_end, storage_.unmasked_end[w]);
      negate_scores = negate_scores || storage_.negate_scores[w];
    }
    if constexpr (kVariant == Variant::kAlibi) context.unmasked_end = unmasked_end;
    context.negate_scores = negate_scores;
    context.num_rows = work_tile.row_end - work_tile.row_begin;
    context.first_tile = any_keys ? work_tile.kv_begin / kBlockN : 0;
    context.num_tiles = any_keys ? (work_tile.kv_end + kBlockN - 1) / kBlockN - context.first_tile : 0;
    if (kVariant == Variant::kMask && any_keys && context.uses_custom_mask) {  // more may be hidden than the plan knows
      const bool any_visible = visible.any_begin < visible.any_end;
      context.first_tile = any_visible ? visible.any_begin / kBlockN : 0;
      context.num_tiles = any_visible ? (visible.any_end + kBlockN - 1) / kBlockN - context.first_tile : 0;
    }
    context.by_threads = any_keys && params_.loads[work_tile.segment].tma_tokens == 0;
    context.q_by_tma = params_.q_by_tma && has_whole_rows(work_tile);
    const AttentionParams& params = params_.attention;
    context.is_half = params.out_dtype == DType::kFloat16;
    context.fast_epilogue = context.num_tiles > 0 && work_tile.flags == (scheduler::kStart | scheduler::kFinish) &&
                            work_tile.partial < 0 && params_.out_16B_aligned &&
                            (context.is_half || params.out_dtype == DType::kBFloat16) && params.sinks == nullptr &&
                            params.lse.data == nullptr;
    context.out_by_tma = context.fast_epilogue && params_.out_by_tma && has_whole_rows(work_tile);
    context.out = params.out;
    context.all_done = false;
  }

  /// Stores which row is the thread's number `r`; kAlibi: also loads its slope. Returns where its Q begins, or -1 where
  /// the work tile has no such row.
  __device__ __forceinline__ int64_t locate_row(const scheduler::WorkTile& work_tile, RowInfo& rows, int32_t r) {
    const int32_t row = row_of(r);
    const AttentionParams& params = params_.attention;
    if (row >= work_tile.row_end - work_tile.row_begin) return -1;
    const auto group_size = static_cast<int32_t>(params_.group.divisor());
    const int32_t packed = work_tile.row_begin + row;
    const auto token = static_cast<int32_t>(params_.group.quotient(static_cast<uint32_t>(packed)));
    const int32_t q_head = work_tile.kv_head * group_size + (packed - token * group_size);
    rows.token[row] = token;
    rows.q_head[row] = q_head;
    rows.out[row] = token * params.out_token_stride + q_head * params.out_head_stride;
    if constexpr (kVariant == Variant::kAlibi) {
      slope_[r] = params.alibi_slopes[q_head];
    } else {
      rows.slope[row] = params.alibi_slopes == nullptr ? 0.0f : __fmul_rn(params.alibi_slopes[q_head], kLog2E);
    }
    return token * params.q_token_stride + q_head * params.q_head_stride;
  }

 protected:
  /// Whether all rows are there and the first is a token's first head: TMA may copy them.
  __device__ __forceinline__ bool has_whole_rows(const scheduler::WorkTile& work_tile) const {
    return work_tile.row_end - work_tile.row_begin == kBlockM &&
           params_.group.remainder(static_cast<uint32_t>(work_tile.row_begin)) == 0;
  }

  /// Waits until the consumers have released work tile `number`; the first thread then begins to store its output, if
  /// TMA does that.
  __device__ __forceinline__ void store_output(int32_t number) const {
    const int32_t tile_buffer = number % kTileBuffers;
    ptx::mbarrier_wait_warp(ptx::shared_address(storage_.tile_empty) + 8 * static_cast<uint32_t>(tile_buffer),
                            static_cast<uint32_t>(number / kTileBuffers) & 1);
    if (fetch_thread() != 0 || !storage_.contexts[tile_buffer].out_by_tma) return;
    const scheduler::WorkTile& work_tile = storage_.contexts[tile_buffer].work_tile;
#pragma unroll
    for (int32_t warpgroup = 0; warpgroup < kConsumerWarpgroups; ++warpgroup) {
      const uint32_t token =
          params_.group.quotient(static_cast<uint32_t>(work_tile.row_begin + warpgroup * kWarpgroupRows));
      ptx::tma_store_5d(
          &params_.output, q_buffer(tile_buffer % q_buffers(kDims)) + static_cast<uint32_t>(warpgroup * q_bytes(DimQk)),
          0, work_tile.kv_head * static_cast<int32_t>(params_.group.divisor()), static_cast<int32_t>(token), 0, 0);
    }
  }

  /// Copies Q of a fetch warp's rows, of which the work tile may lack some; these become zeros.
  __device__ __forceinline__ void copy_q(int32_t buffer) const {
    constexpr int32_t kChunks = DimQk / kElementsPer16B;
    const uint32_t to = q_buffer(buffer);
    const AttentionParams& params = params_.attention;
#pragma unroll 1
    for (int32_t i = lane_; i < 32 * kRows * kChunks; i += 32) {
      const int32_t r = i / (32 * kChunks);
      int64_t query = q_offset_[0];
#pragma unroll
      for (int32_t k = 1; k < kRows; ++k) query = r == k ? q_offset_[k] : query;
      const int32_t in_warp = i / kChunks % 32;
      const int64_t at = __shfl_sync(kAllLanes, query, in_warp);
      const uint32_t target = to + static_cast<uint32_t>(q_tile_offset(
                                       DimQk, 32 * fetch_warp() + r * kFetchThreads + in_warp, i % kChunks));
      const int64_t from = at < 0 ? 0 : at + i % kChunks * kElementsPer16B;
      if (params.q_wide && !is_fp8(params.q_dtype)) {
        ptx::cp_async_16(target, static_cast<const uint16_t*>(params.q) + from, at >= 0);
      } else if (params.q_wide) {
        const auto* const fp8 = reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(params.q) + from);
        store_upcast_fp8x8<T>(target, at >= 0 ? *fp8 : uint2{}, params.q_dtype);
      } else {
        copy_upcast_16B<T>(target, params.q, params.q_dtype, from, at >= 0);
      }
    }
  }

  __device__ __forceinline__ uint32_t q_buffer(int32_t buffer) const {
    return memory_ + static_cast<uint32_t>(kLayout.q + buffer * kConsumerWarpgroups * q_bytes(DimQk));
  }

  __device__ __forceinline__ uint32_t full_barrier(int32_t tile_buffer) const {
    return ptx::shared_address(storage_.tile_full) + 8 * static_cast<uint32_t>(tile_buffer);
  }
  /// Commits what this thread has written and copied for the work tile.
  __device__ __forceinline__ void commit_work_tile(int32_t tile_buffer) const {
    const uint32_t barrier = full_barrier(tile_buffer);
    ptx::cp_async_mbarrier_arrive(barrier);
    ptx::mbarrier_arrive(barrier);
  }

  const PrefillParams& params_;
  SharedStorage& storage_;
  const uint32_t memory_;
  const int32_t warp_;
  const int32_t lane_;
  int32_t index_ = -1;       ///< of the work tile that is prefetched; -1: there is none
  int64_t q_offset_[kRows];  ///< where Q of this thread's rows begins; -1: there is no such row

 private:
  int32_t continuation_ = -1;  ///< first fetch thread: the next work tile of the same output tile, or -1
  uint32_t ticket_ = 0;        ///< first fetch thread: from the counter of dynamic work tiles
  int32_t word_ = 0;           ///< first fetch warp: of the work tile
  int32_t length_ = 0;         ///< see fetch_lengths
  float slope_[kRows];         ///< kAlibi: of this thread's rows
  static constexpr int32_t kLengths = 10;
  static constexpr int32_t kFirstPage = 5;  ///< one of them, which only segments with an indptr have
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
