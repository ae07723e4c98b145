#pragma once

#include "kernels/cuda/sm90/common/copy.cuh"
#include "kernels/cuda/sm90/common/prefetch.cuh"
#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/common/tile_scheduler.cuh"
#include "kernels/cuda/sm90/mla/mask.cuh"
#include "kernels/cuda/sm90/mla/producer_fp8.cuh"
#include "ptx/tma.cuh"
#include "scheduler/mask_bounds.hpp"

/// The producer warpgroup. It fetches work tiles, finds the visible KV range of each row, and loads Q, K and V as far
/// ahead of the consumers as the KV pipeline has stages. Each of the first three warps loads one part of every KV tile
/// by TMA; the third loads Q too. The fourth, the scheduler warp, claims and describes work tiles. Where the producer
/// dequantizes fp8 data, the fourth warp loads it.
namespace folio::inline v0::kernels::cuda::sm90::mla {

template <typename Traits>
class Producer {
  using T = typename Traits::T;
  using L = typename Traits::L;
  static constexpr bool kDequantizes = Traits::kDequantizes;
  static constexpr Fp8 kFp8 = Traits::kFp8;

 public:
  __device__ __forceinline__ Producer(const MlaParams& params, unsigned char* smem, typename Traits::Storage& storage)
      : params_(params),
        storage_(storage),
        smem_(ptx::shared_address(smem)),
        kv_full_(ptx::shared_address(storage.kv_full)),
        kv_empty_(ptx::shared_address(storage.kv_empty)),
        v_landed_(ptx::shared_address(storage.v_landed)),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        fp8_producer_(smem, storage),
        indptr_(params.attention, lane_) {}

  __device__ __forceinline__ void run() {
    const scheduler::PlanView& plan = params_.attention.plan->view;
    const DynamicTileScheduler tile_scheduler(plan, params_.attention.tile_counters, plan.num_workers);
    int32_t next = tile_scheduler.initial_work_tile();  // of later ones, the scheduler warp knows it
    for (;; ++num_work_tiles_) {
      const int32_t slot = num_work_tiles_ % kWorkTileSlots;
      const int32_t use = num_work_tiles_ / kWorkTileSlots;
      WorkTileContext& context = storage_.contexts[slot];
      Begun begun;
      // Where the producer dequantizes fp8 data, the scheduler warp loads it.
      if (num_work_tiles_ == 0 && next >= 0 && (kDequantizes || warp_ != kSchedulerWarp)) {
        begin(plan.work_tiles[next], slot, begun);
      }
      if (warp_ == kSchedulerWarp) {
        if (use > 0) ptx::mbarrier_wait(ptx::shared_address(storage_.work_tile_empty) + 8 * slot, (use - 1) & 1);
        if (next >= 0) {
          describe(plan, plan.work_tiles[next], context, storage_.rows[slot]);
        } else if (lane_ == 0) {
          context.done = true;
        }
      }
      __syncwarp();
      ptx::named_barrier_sync(kProducerBarrier, kWarpgroupThreads);  // the work tile is described
      if (context.done) break;
      load_work_tile(context, slot, begun);
      if (warp_ == kSchedulerWarp) next = tile_scheduler.next_work_tile(context.work_tile);
    }
    commit_work_tile(num_work_tiles_ % kWorkTileSlots, false);
    if (warp_ == kSchedulerWarp) tile_scheduler.finish();
  }

 private:
  static constexpr bool kHasRope = Traits::kHasRope;
  static constexpr int32_t kChunkElements = 16 / element_bytes(kFp8);  ///< of keys and values
  static constexpr int32_t kQWarp = kRope;                             ///< loads Q by TMA
  static constexpr int32_t kSchedulerWarp = 3;                         ///< claims and describes work tiles
  static constexpr int32_t kLoaderThreads = 32 * kSchedulerWarp;
  static_assert(kSchedulerWarp == kKvParts && kSchedulerWarp < kWarpgroupWarps);

  /// A KV tile in flight.
  struct TileLoad {
    PipelineState state;
    int32_t first;  ///< local token
    bool has_v;     ///< its first components are values
  };

  /// A lane's place in the page table: of one TMA tile of a KV tile, for as many KV tiles as the warp has lanes for.
  struct PageWindow {
    TokenPlace here;
    TokenPlace next;  ///< of the KV tiles behind these
  };

  static constexpr int32_t kQLanes = 8;  ///< of a row
  static constexpr int32_t kQChunks = Traits::kDimQk / kElementsPer16B;
  static constexpr int32_t kQRowStep = kLoaderThreads / kQLanes;
  static constexpr bool kConvertsQ = (kFp8 != Fp8::kNone || kDequantizes) && kIsHalf<T>;
  static constexpr int32_t kQRowSteps = (Traits::kBlockM + kQRowStep - 1) / kQRowStep;  ///< of a warp

  /// What the CTA's first work tile has got before it is described.
  struct Begun {
    PageWindow window;
    bool has_window = false;
  };

  static __device__ __forceinline__ KvTiles kv_tiles(const scheduler::WorkTile& work_tile) {
    if (work_tile.kv_begin >= work_tile.kv_end) return {};
    const int32_t first = work_tile.kv_begin / kBlockN;
    const int32_t count = (work_tile.kv_end + kBlockN - 1) / kBlockN - first;
    return {first + count - 1, count, work_tile.kv_begin, work_tile.kv_end};
  }
  /// The work tile's row of the page table. Null if it has no keys or they are not paged.
  __device__ __forceinline__ const int32_t* page_table_row(const scheduler::WorkTile& work_tile) const {
    const SegmentParams& segment = params_.attention.segments[work_tile.segment];
    if (work_tile.kv_begin >= work_tile.kv_end || !segment.paged) return nullptr;
    if (segment.indptr == nullptr) {
      return segment.indices + work_tile.kv_row * segment.row_stride + segment.first_column;
    }
    if constexpr (kDequantizes)
      return segment.indices + segment.indptr[work_tile.kv_row];  // it has no register to spare
    return segment.indices + indptr_.begin_of(params_.attention, work_tile);
  }
  __device__ __forceinline__ PageWindow first_window(const KvTiles& tiles, const KvCopy& copy,
                                                     const int32_t* pages) const {
    return {find_tma_tile(tiles, 0, copy, pages), find_tma_tile(tiles, 32 >> copy.log2_tma_tiles, copy, pages)};
  }
  __device__ __forceinline__ bool is_fp8_segment(int32_t segment) const {
    return Traits::kDsMla ? kDequantizes : kDequantizes && is_fp8(params_.attention.segments[segment].dtype);
  }

  /// KV tiles of the CTA's first work tile whose loads are on their way when it is described. Their V is committed
  /// then.
  static __device__ __forceinline__ int32_t num_begun_kv_tiles(const KvTiles& tiles, const KvCopy& copy) {
    return copy.tma_tokens > 0 && copy.v_in_k ? min(tiles.count, L::kStages) : 0;
  }

  /// The CTA's first work tile: nothing is in the pipeline. Its first loads begin while the scheduler warp still finds
  /// what its rows see.
  __device__ __forceinline__ void begin(const scheduler::WorkTile& work_tile, int32_t slot, Begun& begun) const {
    const KvCopy& copy = params_.copies[work_tile.segment];
    const KvTiles tiles = kv_tiles(work_tile);
    const MlaParams::TensorMaps& maps = params_.maps[work_tile.segment];
    const bool fp8 = is_fp8_segment(work_tile.segment);
    if (tiles.count > 0 && copy.tma_tokens > 0) {
      begun.window = first_window(tiles, copy, page_table_row(work_tile));
      begun.has_window = true;
    }
    const bool q_by_tma = params_.q_by_tma && is_whole_tokens(work_tile);
    if (q_by_tma) load_q_by_tma(work_tile, slot);
    const int32_t num_begun = num_begun_kv_tiles(tiles, copy);
    for (int32_t i = 0; i < num_begun; ++i) {
      const auto number = static_cast<uint32_t>(i);
      if (fp8) {
        load_fp8_by_tma({number, tiles.first_token(i), true}, maps, tiles, copy, i, begun.window, work_tile.kv_head);
      } else {
        issue_tma({pipeline_state<L>(number), tiles.first_token(i), true}, maps, tiles, copy, true, true, i,
                  begun.window, work_tile.kv_head);
      }
    }
    if (warp_ != kSchedulerWarp && !q_by_tma) load_q(work_tile);
  }

  __device__ __forceinline__ void load_work_tile(const WorkTileContext& context, int32_t slot, Begun& begun) {
    const AttentionParams& params = params_.attention;
    const scheduler::WorkTile& work_tile = context.work_tile;
    const SegmentParams& segment = params.segments[work_tile.segment];
    const KvCopy& copy = params_.copies[work_tile.segment];
    const KvTiles tiles = kv_tiles(work_tile);
    const int32_t* const pages = page_table_row(work_tile);
    const bool fp8 = tiles.count > 0 && is_fp8_segment(work_tile.segment);
    const bool by_tma = tiles.count > 0 && copy.tma_tokens > 0;
    const bool q_by_tma = params_.q_by_tma && is_whole_tokens(work_tile);
    const int32_t num_begun = num_work_tiles_ == 0 ? num_begun_kv_tiles(tiles, copy) : 0;
    if (by_tma && !begun.has_window) begun.window = first_window(tiles, copy, pages);
    if (warp_ != kSchedulerWarp && num_work_tiles_ > 0) {
      ptx::mbarrier_wait(ptx::shared_address(&storage_.q_empty), (num_work_tiles_ - 1) & 1);
      if (q_by_tma) {
        load_q_by_tma(work_tile, slot);
      } else {
        load_q(work_tile);
      }
    }
    if (warp_ != kSchedulerWarp && !q_by_tma) scale_rows(storage_.rows[slot]);
    commit_work_tile(slot, q_by_tma);
    if (tiles.count == 0) return;
    const Boundary boundary{context.visible, context.custom_mask};
    if constexpr (kDequantizes && Traits::kDsMla) {
      load_fp8(tiles, boundary, work_tile, pages, begun.window, num_begun);
    } else if (fp8) {
      load_fp8(tiles, boundary, work_tile, pages, begun.window, num_begun);
    } else if (by_tma) {
      load_by_tma(tiles, boundary, params_.maps[work_tile.segment], copy, pages, work_tile.kv_head, begun.window,
                  num_begun);
    } else {
      load_by_threads(tiles, boundary, segment, copy, pages, work_tile);
    }
  }

  /// Loads, a word a lane, what `describe` needs to know of the work tile's first request.
  static constexpr int32_t kLengths = 5;
  static constexpr int32_t kFirstPos = 4;  ///< one of them
  __device__ __forceinline__ int32_t fetch_length(const scheduler::PlanView& plan, const scheduler::WorkTile& work_tile,
                                                  bool has_keys) const {
    if (!has_keys) return 0;
    const scheduler::SegmentLengths& lengths = plan.segments[work_tile.segment];
    const int32_t* const from[kLengths] = {plan.cu_q + work_tile.request, plan.cu_q + work_tile.request + 1,
                                           plan.q_first_pos + work_tile.request, lengths.kv_len + work_tile.kv_row,
                                           lengths.first_pos + work_tile.kv_row};
    const int32_t* at = from[0];
#pragma unroll
    for (int32_t i = 1; i < kLengths; ++i) at = lane_ == i ? from[i] : at;
    return *at;
  }

  /// By the scheduler warp: finds what the rows of a work tile see, a row a lane, and writes all that the other warps
  /// need to know of it.
  __device__ __forceinline__ void describe(const scheduler::PlanView& plan, const scheduler::WorkTile& work_tile,
                                           WorkTileContext& context, RowInfo& rows) const {
    const AttentionParams& params = params_.attention;
    const bool has_keys = work_tile.kv_begin < work_tile.kv_end;
    const int32_t length = fetch_length(plan, work_tile, has_keys);
    const SegmentMask mask = has_keys ? plan.segments[work_tile.segment].mask : SegmentMask::kAsConfig;
    const KvShard shard = has_keys ? plan.segments[work_tile.segment].shard : KvShard{};
    const bool custom_mask = has_keys && params.mask.kind == MaskKind::kCustom && mask == SegmentMask::kAsConfig;
    const int32_t num_rows = work_tile.row_end - work_tile.row_begin;
    int32_t lengths_of[kLengths];
#pragma unroll
    for (int32_t i = 0; i < kLengths; ++i) lengths_of[i] = __shfl_sync(kAllLanes, length, i);
    VisibleRange visible{INT32_MAX, 0, 0, INT32_MAX};
    bool negate = false;
#pragma unroll 1
    for (int32_t row = lane_; row < Traits::kBlockM; row += 32) {
      int32_t begin = 0;
      int32_t end = 0;
      if (row < num_rows) {
        const QueryRow query = query_row(work_tile, row);
        float scale = 0.0f;
        float v_scale = 1.0f;
        if (has_keys) {
          const SegmentParams& segment = params.segments[work_tile.segment];
          auto [first_row, row_end, first_query, kv_len, first_pos] = lengths_of;
          int32_t request = work_tile.request;
          while (row_end <= query.token) {
            first_row = row_end;
            ++request;
            row_end = plan.cu_q[request + 1];
            first_query = plan.q_first_pos[request];
          }
          const int32_t number = query.token - first_row;
          const int64_t position = int64_t{first_query} + number;
          const scheduler::MaskBounds mask_bounds = scheduler::mask_bounds(params.mask, mask);
          const scheduler::TokenRange range = scheduler::visible_to_token(
              {first_pos, kv_len, shard}, mask_bounds, plan.visible_positions, query.token, position);
          begin = static_cast<int32_t>(range.begin < work_tile.kv_begin ? work_tile.kv_begin : range.begin);
          end = static_cast<int32_t>(range.end > work_tile.kv_end ? work_tile.kv_end : range.end);
          if (begin >= end) begin = end = 0;
          rows.position[row] = static_cast<int32_t>(position);
          rows.mask_begin[row] = INT32_MAX;
          if (custom_mask) {
            const int32_t mask_begin =
                plan.mask_first_column[request] - plan.segments[work_tile.segment].key_offset[request];
            rows.mask_begin[row] = mask_begin;
            rows.mask_bit[row] =
                8 * plan.mask_byte_indptr[request] + int64_t{number} * plan.mask_columns[request] - mask_begin;
          }
          scale = __fmul_rn(__fmul_rn(scale_at(params.q_scale, request, work_tile.kv_head),
                                      scale_at(segment.k_scale, request, work_tile.kv_head)),
                            params.sm_scale);
          if (!has_bias(params)) scale = __fmul_rn(scale, kLog2E);
          v_scale = scale_at(segment.v_scale, request, work_tile.kv_head);
        }
        rows.token[row] = query.token;
        rows.q_head[row] = query.head;
        rows.scale[row] = scale;
        rows.v_scale[row] = v_scale;
        negate = negate || !(scale > 0.0f);
        if (begin < end) {
          visible.any_begin = min(visible.any_begin, begin);
          visible.any_end = max(visible.any_end, end);
        }
        visible.all_begin = max(visible.all_begin, begin);
        visible.all_end = min(visible.all_end, end);
      }
      rows.visible_begin[row] = begin;
      rows.visible_end[row] = end;
    }
    visible.any_begin = __reduce_min_sync(kAllLanes, visible.any_begin);
    visible.any_end = __reduce_max_sync(kAllLanes, visible.any_end);
    visible.all_begin = __reduce_max_sync(kAllLanes, visible.all_begin);
    visible.all_end = __reduce_min_sync(kAllLanes, visible.all_end);
    negate = __any_sync(kAllLanes, negate);
    constexpr int32_t kWords = sizeof(scheduler::WorkTile) / sizeof(int32_t);
    static_assert(std::is_trivially_copyable_v<scheduler::WorkTile> && kWords <= 32);
    if (lane_ < kWords) {
      reinterpret_cast<int32_t*>(&context.work_tile)[lane_] = reinterpret_cast<const int32_t*>(&work_tile)[lane_];
    }
    if (lane_ > 0) return;
    const KvTiles tiles = kv_tiles(work_tile);
    const KvCopy& copy = params_.copies[work_tile.segment];
    context.visible = visible;
    context.num_rows = num_rows;
    context.last_kv_tile = tiles.last;
    context.num_kv_tiles = tiles.count;
    context.custom_mask = custom_mask;
    context.negate_scores = negate;
    context.v_in_k = copy.v_in_k;
    context.by_threads = has_keys && copy.tma_tokens == 0 && !is_fp8_segment(work_tile.segment);
    context.out_16B = params_.out_16B;
    context.done = false;
    context.shard = shard;
    context.first_pos = lengths_of[kFirstPos];
  }

  /// A packed row's query.
  struct QueryRow {
    int32_t token;
    int32_t head;
  };
  __device__ __forceinline__ QueryRow query_row(const scheduler::WorkTile& work_tile, int32_t row) const {
    const int32_t group_size = params_.attention.num_q_heads / params_.attention.num_kv_heads;
    const int32_t packed = work_tile.row_begin + row;
    const int32_t token = packed / group_size;
    return {token, work_tile.kv_head * group_size + (packed - token * group_size)};
  }

  /// By the loading warps: copies Q. Rows beyond the work tile become zeros. Where the MMA needs it, bfloat16 becomes
  /// float16.
  __device__ __forceinline__ void load_q(const scheduler::WorkTile& work_tile) const {
    const AttentionParams& params = params_.attention;
    const bool by_16B = params.q_wide && (!(kDequantizes || Traits::kSwapsAb) || !is_fp8(params.q_dtype));
    const int32_t num_rows = work_tile.row_end - work_tile.row_begin;
#pragma unroll 1
    for (int32_t row = first_q_row(); row < Traits::kBlockM; row += kQRowStep) {
      const QueryRow query = query_row(work_tile, row);
      const bool valid = row < num_rows;
      const int64_t at = valid ? query.token * params.q_token_stride + query.head * params.q_head_stride : 0;
#pragma unroll 1
      for (int32_t i = lane_ % kQLanes; i < kQChunks; i += kQLanes) {
        const uint32_t target = smem_ + static_cast<uint32_t>(L::q_offset(row, i));
        if (by_16B) {
          ptx::cp_async_16(target, static_cast<const T*>(params.q) + at + i * kElementsPer16B, valid);
        } else if (keeps_bfloat16(i / kQLanes)) {
          copy_upcast_16B<__nv_bfloat16>(target, params.q, params.q_dtype, at + i * kElementsPer16B, valid);
        } else {
          copy_upcast_16B<T>(target, params.q, params.q_dtype, at + i * kElementsPer16B, valid);
        }
      }
    }
    if constexpr (kConvertsQ) {
      if (params.q_dtype != DType::kBFloat16) return;
      ptx::cp_async_wait_all();
#pragma unroll 1
      for (int32_t i = 0; i < kQRowSteps; ++i) convert_q_row(first_q_row() + i * kQRowStep);
    }
  }
  /// Whether a column block of Q meets keys that are bfloat16: the RoPE part of rows of fp8_ds_mla.
  static __device__ __forceinline__ bool keeps_bfloat16(int32_t block) {
    return Traits::kDsMla && block == kHeadDimV / 64;
  }
  /// Once the work tile is described.
  __device__ __forceinline__ void scale_rows(RowInfo& rows) const {
    if constexpr (kConvertsQ) {
      if (params_.attention.q_dtype != DType::kBFloat16 || lane_ % kQLanes > 0) return;
#pragma unroll 1
      for (int32_t row = first_q_row(); row < Traits::kBlockM; row += kQRowStep) {
        rows.scale[row] *= storage_.q_factors[row];
      }
    }
  }
  __device__ __forceinline__ static int32_t first_q_row() {
    return static_cast<int32_t>(threadIdx.x) / kQLanes;
  }

  /// By a row's lanes, in place: each has the chunks that it has copied. All lanes of a warp call it; a row beyond the
  /// last is none.
  __device__ __forceinline__ void convert_q_row(int32_t row) const {
    const int32_t lane = lane_ % kQLanes;
    const bool valid = row < Traits::kBlockM;
    const uint32_t first = smem_ + static_cast<uint32_t>(L::q_offset(row, lane));
    const uint32_t count = valid ? kQChunks / kQLanes : 0;
    uint32_t most = 0;
#pragma unroll 3
    for (uint32_t i = 0; i < count; ++i) {
      most = max_magnitude(ptx::ld_shared_16(first + i * L::kQBlockBytes), most);
    }
#pragma unroll
    for (int32_t lanes = 1; lanes < kQLanes; lanes *= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, lanes));
    const int32_t exponent = float16_row_exponent(most);
    if (!valid) return;
#pragma unroll 3
    for (uint32_t i = 0; i < count; ++i) {
      uint4 chunk = ptx::ld_shared_16(first + i * L::kQBlockBytes);
      if (keeps_bfloat16(static_cast<int32_t>(i))) {
        divide_bfloat16(chunk, exponent);
      } else {
        to_float16(chunk, exponent);
      }
      ptx::st_shared_16(first + i * L::kQBlockBytes, chunk);
    }
    if (lane == 0) storage_.q_factors[row] = power_of_two(exponent);
  }

  /// Whether the work tile's rows are whole tokens, or 64 heads of one: TMA may load their Q.
  __device__ __forceinline__ bool is_whole_tokens(const scheduler::WorkTile& work_tile) const {
    const int32_t num_rows = work_tile.row_end - work_tile.row_begin;
    return num_rows % params_.q_tma_heads == 0 && work_tile.row_begin % params_.q_tma_heads == 0;
  }

  /// By one warp. A TMA tile is one column block of up to 64 heads of a token. Rows beyond the work tile's keep
  /// what was there: nobody reads what becomes of them.
  __device__ __forceinline__ void load_q_by_tma(const scheduler::WorkTile& work_tile, int32_t slot) const {
    if (warp_ != kQWarp) return;
    const uint32_t barrier = ptx::shared_address(storage_.work_tile_full) + 8 * static_cast<uint32_t>(slot);
    const int32_t num_rows = work_tile.row_end - work_tile.row_begin;
    if (lane_ == 0) ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(num_rows * 2 * Traits::kDimQk));
    __syncwarp();
    const int32_t heads = params_.q_tma_heads;
    const uint64_t policy = ptx::evict_first_policy();
    constexpr int32_t kBlocks = Traits::kDimQk / 64;
    const int32_t count = num_rows / heads * kBlocks;
    for (int32_t i = lane_; i < count; i += 32) {
      const int32_t block = i % kBlocks;
      const int32_t row = i / kBlocks * heads;
      const QueryRow query = query_row(work_tile, row);
      ptx::tma_load_5d(smem_ + static_cast<uint32_t>(L::kQOffset + block * L::kQBlockBytes + row * 128), &params_.q_map,
                       barrier, 0, query.head, query.token, block, 0, policy);
    }
  }

  /// Commits what this thread has written of a work tile's description and of Q. Where TMA loads Q, one lane has
  /// arrived when it expected its bytes.
  __device__ __forceinline__ void commit_work_tile(int32_t slot, bool q_by_tma) const {
    const uint32_t barrier = ptx::shared_address(storage_.work_tile_full) + 8 * static_cast<uint32_t>(slot);
    if (!q_by_tma) {
      ptx::cp_async_mbarrier_arrive(barrier);
      ptx::mbarrier_arrive(barrier);
      return;
    }
    ptx::mbarrier_arrive(barrier, warp_ == kQWarp && lane_ == 0 ? kLaneArrivals - 1 : kLaneArrivals);
  }

  __device__ __forceinline__ uint32_t tile_address(const PipelineState& at) const {
    return smem_ + at.stage * static_cast<uint32_t>(L::kTileBytes);
  }
  /// Waits until the consumers have released the part. In the first round through the stages it does not wait: of a new
  /// barrier, the phase before the first counts as complete.
  __device__ __forceinline__ void producer_acquire(const PipelineState& at, int32_t part) const {
    ptx::mbarrier_wait(kv_empty_ + kv_barrier_offset(at, part), at.parity ^ 1);
  }
  /// Commits a part that this thread has written to or scanned.
  __device__ __forceinline__ void producer_commit(const PipelineState& at, int32_t part) const {
    ptx::fence_view_async_shared();
    ptx::mbarrier_arrive(kv_full_ + kv_barrier_offset(at, part), kLaneArrivals);
  }
  /// Commits a part that this thread has copied to: with cp.async (`is_async`), once they are complete.
  __device__ __forceinline__ void producer_commit_copies(const PipelineState& at, int32_t part, bool is_async) const {
    if (!is_async) {
      producer_commit(at, part);
      return;
    }
    ptx::cp_async_mbarrier_arrive(kv_full_ + kv_barrier_offset(at, part));
    ptx::mbarrier_arrive(kv_full_ + kv_barrier_offset(at, part));
  }

  /// Loads pages whose size is a multiple of eight by TMA. The first `num_issued` KV tiles are on their way: their V is
  /// to be committed.
  __device__ __forceinline__ void load_by_tma(const KvTiles& tiles, const Boundary& boundary,
                                              const MlaParams::TensorMaps& maps, const KvCopy& copy,
                                              const int32_t* pages, int32_t head, PageWindow& window,
                                              int32_t num_issued) {
    const int32_t at_once = 32 >> copy.log2_tma_tiles;
    for (int32_t i = 0; i < num_issued; ++i) {
      wait_and_scan(boundary, {pipeline_state<L>(num_kv_tiles_++), tiles.first_token(i), true});
    }
    TileLoad first{};
    bool pending = false;
    const auto load = [&](bool has_k, bool has_v, int32_t i) {
      const TileLoad tile{pipeline_state<L>(num_kv_tiles_++), tiles.first_token(i), has_v};
      const bool at_boundary = has_v && boundary.has(tile.first);
      issue_tma(tile, maps, tiles, copy, has_k, at_boundary, i, window, head);
      if (pending) wait_and_scan(boundary, first);
      // The second tile is issued before the first is scanned. A later tile would wait for a stage that the consumers
      // release only once they have the tile that is to be scanned.
      pending = at_boundary && has_k && i == 0 && tiles.count > 1;
      if (pending) {
        first = tile;
      } else if (at_boundary) {
        wait_and_scan(boundary, tile);
      }
    };
#pragma unroll 1
    for (int32_t i = num_issued; i < tiles.count; ++i) {
      if (i > 0 && (i << copy.log2_tma_tiles & 31) == 0) {
        window.here = window.next;
        window.next = find_tma_tile(tiles, i + at_once, copy, pages);  // in flight until it is needed
      }
      load(true, copy.v_in_k, i);
      if (!copy.v_in_k) load(false, true, i);
    }
  }

  /// The place of this lane's TMA tile, for KV tiles from `i` on. in_page is negative if it is not loaded.
  __device__ __forceinline__ TokenPlace find_tma_tile(const KvTiles& tiles, int32_t i, const KvCopy& copy,
                                                      const int32_t* pages) const {
    const int32_t in_tile = (lane_ & ((1 << copy.log2_tma_tiles) - 1)) * copy.tma_tokens;
    const int32_t token = tiles.first_token(i + (lane_ >> copy.log2_tma_tiles)) + in_tile;
    if (token + copy.tma_tokens <= tiles.kv_begin || token >= tiles.kv_end) return {0, -1};
    const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(token));
    const uint32_t in_page = static_cast<uint32_t>(token) - column * copy.page_size.divisor();
    return {pages[column], static_cast<int32_t>(in_page)};
  }

  /// Issues the warp's part of KV tile `i`, a TMA tile a lane: the TMA tiles of the first column block, then those of
  /// the next. Their bytes and all arrivals go to the part's barrier, or to v_landed where V is not committed yet.
  __device__ __forceinline__ void issue_tma(const TileLoad& tile, const MlaParams::TensorMaps& maps,
                                            const KvTiles& tiles, const KvCopy& copy, bool has_k, bool at_boundary,
                                            int32_t i, const PageWindow& window, int32_t head) const {
    if (warp_ >= kKvParts) return;
    const bool rope = warp_ == kRope;
    const bool scales = Traits::kDsMla && warp_ == kVLeft;
    const CUtensorMap& map = has_k && !(Traits::kDsMla && rope) ? maps.k : maps.v;
    const int32_t number = lane_ & ((1 << copy.log2_tma_tiles) - 1);
    const int32_t in_part = lane_ >> copy.log2_tma_tiles;
    const int32_t from_lane = (i << copy.log2_tma_tiles & 31) | number;
    const int32_t page = __shfl_sync(kAllLanes, window.here.page, from_lane);
    const int32_t in_page = __shfl_sync(kAllLanes, window.here.in_page, from_lane);
    const int32_t blocks = rope ? (has_k && kHasRope ? 1 : 0) : L::kHalfColumnBlocks;
    const TmaTileRange range = loaded_tma_tiles(tiles.kv_begin, tiles.kv_end, tile.first, copy.tma_tokens);
    const int32_t bytes = copy.tma_tokens * 128;
    const int32_t block = warp_ * L::kHalfColumnBlocks + in_part;
    const uint32_t to = tile_address(tile.state) + static_cast<uint32_t>(block * kColumnBlockBytes + number * bytes);
    const uint32_t barrier =
        at_boundary && !rope ? v_landed_ + 8 * tile.state.stage : kv_full_ + kv_barrier_offset(tile.state, warp_);
    producer_acquire(tile.state, warp_);
    if (lane_ == 0) {
      ptx::mbarrier_arrive(barrier, kFullArrivals - 1);
      const int32_t scale_bytes = scales ? kTokenScaleBytes * copy.tma_tokens : 0;
      ptx::mbarrier_arrive_expect_tx(barrier,
                                     static_cast<uint32_t>((range.end - range.begin) * (blocks * bytes + scale_bytes)));
    }
    __syncwarp();
    if (in_part < blocks && in_page >= 0) {
      if constexpr (kFp8 == Fp8::kNone) {
        ptx::tma_load_5d(to, &map, barrier, 0, in_page, block, head, page, ptx::evict_first_policy());
      } else if constexpr (Traits::kDsMla) {
        ptx::tma_load_5d(to, &map, barrier, rope ? 0 : 128 * block, in_page, 0, page, 0, ptx::evict_first_policy());
        if (scales && in_part == 0) {
          ptx::tma_load_5d(block_scales_of<Traits>(storage_, tile.state.stage, number * copy.tma_tokens), &maps.scales,
                           barrier, 0, in_page, 0, page, 0, ptx::evict_first_policy());
        }
      } else {
        ptx::tma_load_5d(to, &map, barrier, 128 * block, in_page, head, page, 0, ptx::evict_first_policy());
      }
    }
  }

  /// Waits for V of a KV tile, then zeroes, scans and commits it.
  __device__ __forceinline__ void wait_and_scan(const Boundary& boundary, const TileLoad& tile) {
    const uint32_t bit = 1u << tile.state.stage;
    ptx::mbarrier_wait(v_landed_ + 8 * tile.state.stage, (landed_phases_ & bit) != 0 ? 1 : 0);
    landed_phases_ ^= bit;
    scan(boundary, tile);
  }
  __device__ __forceinline__ void scan(const Boundary& boundary, const TileLoad& tile) const {
    bool found = false;
    if (boundary.has(tile.first)) {
      VisibleRange visible = boundary.visible;
      if (boundary.custom_mask) visible.all_end = 0;  // some row may not see any of the tokens
      const uint32_t address = tile_address(tile.state);
      found = zero_and_scan<T, kBlockN, 8 * L::kValueColumnBlocks, kWarpgroupThreads, kFp8>(
          visible, tile.first, boundary.needs_scan(tile.first), static_cast<int32_t>(threadIdx.x),
          [&](int32_t token, int32_t chunk) { return address + static_cast<uint32_t>(tile_offset(token, chunk)); });
    }
    const bool any = __any_sync(kAllLanes, found);
    if (lane_ == 0) {
      for (auto& half : storage_.nonfinite[tile.state.stage]) half[warp_] = any ? 1 : 0;
    }
    producer_commit(tile.state, kVLeft);
    producer_commit(tile.state, kVRight);
  }

  /// Keys and values that are fp8. The first `num_issued` KV tiles are on their way.
  __device__ __forceinline__ void load_fp8(const KvTiles& tiles, const Boundary& boundary,
                                           const scheduler::WorkTile& work_tile, const int32_t* pages,
                                           PageWindow& window, int32_t num_issued) {
    const SegmentParams& segment = params_.attention.segments[work_tile.segment];
    const KvCopy& copy = params_.copies[work_tile.segment];
    fp8_producer_.begin_work_tile();
    if (warp_ == kFp8LoadWarp) {
      load_fp8_tiles(tiles, segment, work_tile, pages, window, num_issued);
    } else if constexpr (Traits::kDsMla) {
      dequantize_tiles<Fp8::kE4M3, true>(tiles, boundary, true);
    } else if (Traits::kTakesDsMla && copy.ds_mla) {
      if constexpr (Traits::kTakesDsMla) dequantize_tiles<Fp8::kE4M3, true>(tiles, boundary, true);
    } else if (segment.dtype == DType::kFloat8E4M3) {
      dequantize_tiles<Fp8::kE4M3, false>(tiles, boundary, copy.v_in_k);
    } else {
      dequantize_tiles<Fp8::kE5M2, false>(tiles, boundary, copy.v_in_k);
    }
    num_kv_tiles_ += static_cast<uint32_t>(copy.v_in_k ? tiles.count : 2 * tiles.count);
  }

  template <Fp8 kFp8, bool DsMla>
  __device__ __forceinline__ void dequantize_tiles(const KvTiles& tiles, const Boundary& boundary, bool v_in_k) {
    uint32_t number = num_kv_tiles_;
#pragma unroll 1
    for (int32_t i = 0; i < (v_in_k ? tiles.count : 2 * tiles.count); ++i) {
      const bool is_k = v_in_k || i % 2 == 0;
      const Fp8Tile tile{number++, tiles.first_token(v_in_k ? i : i / 2), is_k};
      fp8_producer_.template dequantize<kFp8, DsMla>(tile, v_in_k || !is_k, boundary);
    }
  }

  /// By one warp.
  __device__ __forceinline__ void load_fp8_tiles(const KvTiles& tiles, const SegmentParams& segment,
                                                 const scheduler::WorkTile& work_tile, const int32_t* pages,
                                                 PageWindow& window, int32_t num_issued) const {
    const KvCopy& copy = params_.copies[work_tile.segment];
    const MlaParams::TensorMaps& maps = params_.maps[work_tile.segment];
    const int32_t at_once = 32 >> copy.log2_tma_tiles;
    const int32_t head = work_tile.kv_head;
    const int32_t first_token = segment.paged ? 0 : segment.indptr[work_tile.kv_row];
    const bool by_tma = copy.tma_tokens > 0;
    uint32_t number = num_kv_tiles_ + static_cast<uint32_t>(num_issued);
    TokenPlace next[2];
    if (!by_tma) find_tokens(tiles, 0, copy, pages, first_token, next);
#pragma unroll 1
    for (int32_t i = num_issued; i < tiles.count; ++i) {
      const int32_t first = tiles.first_token(i);
      if (by_tma) {
        if (i > 0 && (i << copy.log2_tma_tiles & 31) == 0) {
          window.here = window.next;
          window.next = find_tma_tile(tiles, i + at_once, copy, pages);  // in flight until it is needed
        }
        load_fp8_by_tma({number++, first, true}, maps, tiles, copy, i, window, head);
        if (!copy.v_in_k) load_fp8_by_tma({number++, first, false}, maps, tiles, copy, i, window, head);
      } else {
        const TokenPlace places[2] = {next[0], next[1]};
        find_tokens(tiles, i + 1, copy, pages, first_token, next);
        fp8_producer_.load_by_threads({number++, first, true}, segment.k, segment.k_strides, copy, places, head);
        if (copy.v_in_k) continue;
        fp8_producer_.load_by_threads({number++, first, false}, segment.v, segment.v_strides, copy, places, head);
      }
    }
  }
  __device__ __forceinline__ void load_fp8_by_tma(const Fp8Tile& tile, const MlaParams::TensorMaps& maps,
                                                  const KvTiles& tiles, const KvCopy& copy, int32_t i,
                                                  const PageWindow& window, int32_t head) const {
    if (warp_ != kFp8LoadWarp) return;
    const int32_t from_lane = i << copy.log2_tma_tiles & 31;
    fp8_producer_.load_by_tma(tile, maps, tiles, copy, window.here, from_lane, head);
  }
  /// The places of a lane's two tokens of KV tile `i`.
  __device__ __forceinline__ void find_tokens(const KvTiles& tiles, int32_t i, const KvCopy& copy, const int32_t* pages,
                                              int32_t first_token, TokenPlace (&places)[2]) const {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t token = tiles.first_token(i) + 32 * half + lane_;
      places[half] = {0, -1};
      if (token < tiles.kv_begin || token >= tiles.kv_end) continue;
      if (pages == nullptr) {
        places[half].in_page = first_token + token;
        continue;
      }
      const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(token));
      places[half].page = pages[column];
      places[half].in_page = static_cast<int32_t>(static_cast<uint32_t>(token) - column * copy.page_size.divisor());
    }
  }

  /// Loads keys and values of any page size, strides and alignment.
  __device__ __forceinline__ void load_by_threads(const KvTiles& tiles, const Boundary& boundary,
                                                  const SegmentParams& segment, const KvCopy& copy,
                                                  const int32_t* pages, const scheduler::WorkTile& work_tile) {
    const int32_t first_token = segment.paged ? 0 : segment.indptr[work_tile.kv_row];
#pragma unroll 1
    for (int32_t i = 0; i < tiles.count; ++i) {
      load_tile(tiles, boundary, i, {segment.k, segment.dtype, segment.k_strides}, true, copy.v_in_k, work_tile.kv_head,
                copy, pages, first_token);
      if (copy.v_in_k) continue;
      load_tile(tiles, boundary, i, {segment.v, segment.dtype, segment.v_strides}, false, true, work_tile.kv_head, copy,
                pages, first_token);
    }
  }

  struct Source {
    const void* data;
    DType dtype;
    const KvStrides& strides;
  };

  /// Each warp copies 16 tokens, each lane finds the place of one. Tokens that no row sees become zeros.
  __device__ __forceinline__ void load_tile(const KvTiles& tiles, const Boundary& boundary, int32_t i,
                                            const Source& source, bool has_k, bool has_v, int32_t head,
                                            const KvCopy& copy, const int32_t* pages, int32_t first_token) {
    const TileLoad tile{pipeline_state<L>(num_kv_tiles_++), tiles.first_token(i), has_v};
    const int32_t token = tile.first + warp_ * 16 + lane_ % 16;
    int64_t begin = -1;
    if (token >= boundary.visible.any_begin && token < boundary.visible.any_end) {
      begin = head * source.strides.head;
      if (pages == nullptr) {
        begin += (int64_t{first_token} + token) * source.strides.token;
      } else {
        const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(token));
        const uint32_t in_page = static_cast<uint32_t>(token) - column * copy.page_size.divisor();
        begin += pages[column] * source.strides.page + in_page * source.strides.token;
      }
    }
    const bool scans = has_v && boundary.needs_scan(tile.first);
#pragma unroll 1
    for (int32_t part = 0; part < kKvParts; ++part) {
      producer_acquire(tile.state, part);
      if (part != kRope || (has_k && kHasRope)) copy_part(tile, part, source, begin, copy.aligned);
      if (scans && part != kRope) continue;
      producer_commit_copies(tile.state, part, copy.aligned);
    }
    if (!scans) return;
    ptx::cp_async_wait_all();
    ptx::named_barrier_sync(kProducerBarrier, kWarpgroupThreads);  // threads scan what others have copied
    scan(boundary, tile);
  }

  __device__ __forceinline__ void copy_part(const TileLoad& tile, int32_t part, const Source& source, int64_t begin,
                                            bool aligned) const {
    constexpr int32_t kRopeChunks = Traits::kDsMla ? kHeadDimRope / kElementsPer16B : kHeadDimRope / kChunkElements;
    const int32_t chunks = part == kRope ? kRopeChunks : 8 * L::kHalfColumnBlocks;  // a power of two
    if constexpr (Traits::kDsMla) {  // of the lane's token; between the latent and the RoPE part of a row
      if (part == kVLeft && lane_ < 16) {
        ptx::cp_async_16(block_scales_of<Traits>(storage_, tile.state.stage, 16 * warp_ + lane_),
                         static_cast<const uint8_t*>(source.data) + (begin < 0 ? 0 : begin + kDsMlaScalesOffset),
                         begin >= 0);
      }
      if (part == kRope && begin >= 0) begin += kTokenScaleBytes;
    }
    const int32_t log2_chunks = 31 - __clz(chunks);
#pragma unroll 1
    for (int32_t n = lane_; n < 16 * chunks; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n >> log2_chunks);
      const int32_t chunk = 8 * L::part_begin(part) + (n & (chunks - 1));
      const uint32_t target =
          tile_address(tile.state) + static_cast<uint32_t>(tile_offset(16 * warp_ + (n >> log2_chunks), chunk));
      const int64_t from = at < 0 ? 0 : at + chunk * kChunkElements;
      if constexpr (kFp8 != Fp8::kNone) {
        const uint8_t* const data = static_cast<const uint8_t*>(source.data) + from;
        if (aligned) {
          ptx::cp_async_16(target, data, at >= 0);
        } else {
          copy_fp8_16B(target, data, at >= 0);
        }
      } else if (aligned) {
        ptx::cp_async_16(target, static_cast<const T*>(source.data) + from, at >= 0);
      } else {
        copy_upcast_16B<T>(target, source.data, source.dtype, from, at >= 0);
      }
    }
  }

  const MlaParams& params_;
  typename Traits::Storage& storage_;
  const uint32_t smem_;
  const uint32_t kv_full_;
  const uint32_t kv_empty_;
  const uint32_t v_landed_;
  const int32_t warp_;
  const int32_t lane_;
  Fp8Producer<Traits> fp8_producer_;
  const IndptrCache indptr_;
  int32_t num_work_tiles_ = 0;
  uint32_t num_kv_tiles_ = 0;  ///< through the KV pipeline, so far
  uint32_t landed_phases_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
