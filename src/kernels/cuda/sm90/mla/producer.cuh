#pragma once

#include "kernels/cuda/sm90/common/copy.cuh"
#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/common/tile_scheduler.cuh"
#include "kernels/cuda/sm90/mla/mask.cuh"
#include "ptx/tma.cuh"
#include "scheduler/mask_bounds.hpp"

/// The producer warpgroup. It fetches work tiles, finds the visible KV range of each row, and loads Q, K and V as far
/// ahead of the consumers as the KV pipeline has stages.
namespace folio::inline v0::kernels::cuda::sm90::mla {

template <typename T>
class Producer {
 public:
  __device__ __forceinline__ Producer(const MlaParams& params, unsigned char* smem, SharedStorage& storage)
      : params_(params),
        storage_(storage),
        smem_(ptx::shared_address(smem)),
        kv_full_(ptx::shared_address(storage.kv_full)),
        kv_empty_(ptx::shared_address(storage.kv_empty)),
        v_landed_(ptx::shared_address(storage.v_landed)),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    const scheduler::PlanView& plan = params_.attention.plan->view;
    const DynamicTileScheduler tile_scheduler(plan, params_.attention.tile_counters);
    int32_t next = tile_scheduler.initial_work_tile();  // known to the first warp
    for (;; ++num_work_tiles_) {
      const int32_t slot = num_work_tiles_ % kWorkTileSlots;
      const int32_t use = num_work_tiles_ / kWorkTileSlots;
      if (use > 0) ptx::mbarrier_wait(ptx::shared_address(storage_.work_tile_empty) + 8 * slot, (use - 1) & 1);
      if (threadIdx.x == 0) storage_.next_work_tile = next;
      ptx::named_barrier_sync(kProducerBarrier, kWarpgroupThreads);
      const int32_t index = storage_.next_work_tile;
      if (index < 0) break;
      const scheduler::WorkTile& work_tile = plan.work_tiles[index];
      if (warp_ == 0) next = tile_scheduler.next_work_tile(work_tile);
      load_work_tile(plan, work_tile, slot);
    }
    if (threadIdx.x == 0) storage_.contexts[num_work_tiles_ % kWorkTileSlots].done = true;
    commit_work_tile(num_work_tiles_ % kWorkTileSlots);
    if (warp_ == 0) tile_scheduler.finish();
  }

 private:
  __device__ __forceinline__ void load_work_tile(const scheduler::PlanView& plan, const scheduler::WorkTile& work_tile,
                                                 int32_t slot) {
    const AttentionParams& params = params_.attention;
    const bool has_keys = work_tile.kv_begin < work_tile.kv_end;
    const bool custom_mask = has_keys && params.mask.kind == MaskKind::kCustom &&
                             plan.segments[work_tile.segment].mask == SegmentMask::kAsConfig;
    const int32_t num_rows = work_tile.row_end - work_tile.row_begin;
    const int64_t query = describe_row(plan, work_tile, num_rows, has_keys, custom_mask, storage_.rows[slot]);
    if (num_work_tiles_ > 0) ptx::mbarrier_wait(ptx::shared_address(&storage_.q_empty), (num_work_tiles_ - 1) & 1);
    load_q(query);
    ptx::named_barrier_sync(kProducerBarrier, kWarpgroupThreads);
    VisibleRange visible = storage_.visible[0];
    const VisibleRange other = storage_.visible[1];
    visible.any_begin = min(visible.any_begin, other.any_begin);
    visible.any_end = max(visible.any_end, other.any_end);
    visible.all_begin = max(visible.all_begin, other.all_begin);
    visible.all_end = min(visible.all_end, other.all_end);
    const int32_t first_kv_tile = has_keys ? work_tile.kv_begin / kBlockN : 0;
    const int32_t num_kv_tiles = has_keys ? (work_tile.kv_end + kBlockN - 1) / kBlockN - first_kv_tile : 0;
    const KvCopy& copy = params_.copies[work_tile.segment];
    if (threadIdx.x == 0) {
      WorkTileContext& context = storage_.contexts[slot];
      context.work_tile = work_tile;
      context.visible = visible;
      context.num_rows = num_rows;
      context.last_kv_tile = first_kv_tile + num_kv_tiles - 1;
      context.num_kv_tiles = num_kv_tiles;
      context.custom_mask = custom_mask;
      context.negate_scores = storage_.negate_scores[0] || storage_.negate_scores[1];
      context.v_in_k = copy.v_in_k;
      context.by_threads = has_keys && copy.tma_tokens == 0;
      context.done = false;
      if (has_keys) {
        context.shard = plan.segments[work_tile.segment].shard;
        context.first_pos = plan.segments[work_tile.segment].first_pos[work_tile.kv_row];
      }
    }
    commit_work_tile(slot);
    if (num_kv_tiles == 0) return;
    const KvTiles tiles{first_kv_tile + num_kv_tiles - 1, num_kv_tiles, visible, custom_mask};
    const SegmentParams& segment = params.segments[work_tile.segment];
    const int32_t* const pages =
        !segment.paged ? nullptr
                       : segment.indices + (segment.indptr != nullptr
                                                ? int64_t{segment.indptr[work_tile.kv_row]}
                                                : work_tile.kv_row * segment.row_stride + segment.first_column);
    if (copy.tma_tokens == 0) {
      load_by_threads(tiles, segment, copy, pages, work_tile);
    } else {
      load_by_tma(tiles, params_.maps[work_tile.segment], copy, pages, work_tile.kv_head);
    }
  }

  /// Finds what this thread's row sees, and the row 64 further on: two threads share a row, and the first writes it to
  /// shared memory. Returns the offset of the row's query, -1 for a row beyond the work tile.
  __device__ __forceinline__ int64_t describe_row(const scheduler::PlanView& plan, const scheduler::WorkTile& work_tile,
                                                  int32_t num_rows, bool has_keys, bool custom_mask,
                                                  RowInfo& rows) const {
    const int32_t row = static_cast<int32_t>(threadIdx.x) % kBlockM;
    const bool writes = threadIdx.x < kBlockM;
    const AttentionParams& params = params_.attention;
    VisibleRange visible{INT32_MAX, 0, 0, INT32_MAX};
    int64_t query = -1;
    int32_t begin = 0;
    int32_t end = 0;
    bool negate = false;
    if (row < num_rows) {
      const int32_t group_size = params.num_q_heads / params.num_kv_heads;
      const int32_t packed = work_tile.row_begin + row;
      const int32_t token = packed / group_size;
      const int32_t q_head = work_tile.kv_head * group_size + (packed - token * group_size);
      query = token * params.q_token_stride + q_head * params.q_head_stride;
      float scale = 0.0f;
      float v_scale = 1.0f;
      if (has_keys) {
        const scheduler::SegmentLengths& lengths = plan.segments[work_tile.segment];
        const SegmentParams& segment = params.segments[work_tile.segment];
        int32_t request = work_tile.request;
        while (plan.cu_q[request + 1] <= token) ++request;
        const int32_t number = token - plan.cu_q[request];
        const int64_t position = int64_t{plan.q_first_pos[request]} + number;
        const scheduler::MaskBounds mask_bounds = scheduler::mask_bounds(params.mask, lengths.mask);
        const scheduler::TokenRange range = scheduler::visible_to_token(
            {lengths.first_pos[work_tile.kv_row], lengths.kv_len[work_tile.kv_row], lengths.shard}, mask_bounds,
            plan.visible_positions, token, position);
        begin = static_cast<int32_t>(range.begin < work_tile.kv_begin ? work_tile.kv_begin : range.begin);
        end = static_cast<int32_t>(range.end > work_tile.kv_end ? work_tile.kv_end : range.end);
        if (begin >= end) begin = end = 0;
        if (writes) {
          rows.position[row] = static_cast<int32_t>(position);
          rows.mask_begin[row] = INT32_MAX;
        }
        if (writes && custom_mask) {
          const int32_t mask_begin = plan.mask_first_column[request] - lengths.key_offset[request];
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
      if (writes) {
        rows.token[row] = token;
        rows.q_head[row] = q_head;
        rows.scale[row] = scale;
        rows.v_scale[row] = v_scale;
      }
      negate = !(scale > 0.0f);
      if (begin < end) {
        visible.any_begin = begin;
        visible.any_end = end;
      }
      visible.all_begin = begin;
      visible.all_end = end;
    }
    if (writes) {
      rows.visible_begin[row] = begin;
      rows.visible_end[row] = end;
    }
    visible.any_begin = __reduce_min_sync(kAllLanes, visible.any_begin);
    visible.any_end = __reduce_max_sync(kAllLanes, visible.any_end);
    visible.all_begin = __reduce_max_sync(kAllLanes, visible.all_begin);
    visible.all_end = __reduce_min_sync(kAllLanes, visible.all_end);
    negate = __any_sync(kAllLanes, negate);
    if (lane_ == 0 && warp_ < 2) {
      storage_.visible[warp_] = visible;
      storage_.negate_scores[warp_] = negate;
    }
    return query;
  }

  /// Two warps share 32 rows, each loads half of their chunks. A lane knows where its row's query begins. Rows beyond
  /// the work tile become zeros.
  __device__ __forceinline__ void load_q(int64_t query) const {
    constexpr int32_t kChunks = kHeadDimQk / kElementsPer16B / 2;
    const int32_t first_row = warp_ % 2 * 32;
    const int32_t first_chunk = warp_ / 2 * kChunks;
    const AttentionParams& params = params_.attention;
#pragma unroll 2
    for (int32_t i = lane_; i < 32 * kChunks; i += 32) {
      const int64_t at = __shfl_sync(kAllLanes, query, i / kChunks);
      const int32_t chunk = first_chunk + i % kChunks;
      const uint32_t target = smem_ + static_cast<uint32_t>(kQOffset + tile_offset(first_row + i / kChunks, chunk));
      const int64_t from = at < 0 ? 0 : at + chunk * kElementsPer16B;
      if (params.q_wide) {
        ptx::cp_async_16(target, static_cast<const T*>(params.q) + from, at >= 0);
      } else {
        copy_upcast_16B<T>(target, params.q, params.q_dtype, from, at >= 0);
      }
    }
  }

  /// Commits what this thread has written of a work tile's description and of Q.
  __device__ __forceinline__ void commit_work_tile(int32_t slot) const {
    const uint32_t barrier = ptx::shared_address(storage_.work_tile_full) + 8 * static_cast<uint32_t>(slot);
    ptx::cp_async_mbarrier_arrive(barrier);
    ptx::mbarrier_arrive(barrier);
  }

  /// The KV tiles of a work tile. Tile 0 is the last along the sequence.
  struct KvTiles {
    int32_t last;
    int32_t count;
    VisibleRange visible;
    bool custom_mask;
    __device__ __forceinline__ int32_t first_token(int32_t i) const { return (last - i) * kBlockN; }
    /// Whether V may have NaN or Inf that some rows see and others do not.
    __device__ __forceinline__ bool needs_scan(int32_t first) const {
      return custom_mask || is_mixed(visible, first, kBlockN);
    }
    /// Whether the producer scans or zeroes some of V before it commits.
    __device__ __forceinline__ bool is_boundary(int32_t first) const {
      return needs_scan(first) || has_invisible(visible, first, kBlockN);
    }
  };

  /// A KV tile in flight.
  struct TileLoad {
    PipelineState state;
    int32_t first;  ///< local token
    bool has_v;     ///< its first components are values
  };

  __device__ __forceinline__ uint32_t tile_address(const PipelineState& at) const {
    return smem_ + at.stage * static_cast<uint32_t>(kTileBytes);
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

  /// Loads pages whose size is a multiple of eight by TMA. Each lane looks up the page of one TMA tile of a column
  /// block, for as many KV tiles as the warp has lanes for.
  __device__ __forceinline__ void load_by_tma(const KvTiles& tiles, const MlaParams::TensorMaps& maps,
                                              const KvCopy& copy, const int32_t* pages, int32_t head) {
    const int32_t at_once = 32 >> copy.log2_tma_tiles;
    const uint64_t policy = ptx::evict_first_policy();
    TokenPlace next = find_tma_tile(tiles, 0, copy, pages);
    TokenPlace here = next;
    TileLoad first{};
    bool pending = false;
    const auto load = [&](const CUtensorMap& map, bool has_k, bool has_v, int32_t i) {
      const TileLoad tile{pipeline_state(num_kv_tiles_++), tiles.first_token(i), has_v};
      const bool boundary = has_v && tiles.is_boundary(tile.first);
      const bool mine = lane_ >> copy.log2_tma_tiles == i % at_once && here.in_page >= 0;
      issue_tma(tile, map, tiles.visible, copy, has_k, boundary, mine, here, head, policy);
      if (pending) wait_and_scan(tiles, first);
      // The second tile is issued before the first is scanned. A later tile would wait for a stage that the consumers
      // release only once they have the tile that is to be scanned.
      pending = boundary && has_k && i == 0 && tiles.count > 1;
      if (pending) {
        first = tile;
      } else if (boundary) {
        wait_and_scan(tiles, tile);
      }
    };
#pragma unroll 1
    for (int32_t i = 0; i < tiles.count; ++i) {
      if (i % at_once == 0) {
        here = next;
        next = find_tma_tile(tiles, i + at_once, copy, pages);  // in flight until it is needed
      }
      load(maps.k, true, copy.v_in_k, i);
      if (!copy.v_in_k) load(maps.v, false, true, i);
    }
  }

  /// The place of this lane's TMA tile, for KV tiles from `i` on. in_page is negative if no row sees any of its tokens.
  __device__ __forceinline__ TokenPlace find_tma_tile(const KvTiles& tiles, int32_t i, const KvCopy& copy,
                                                      const int32_t* pages) const {
    const int32_t in_tile = (lane_ & ((1 << copy.log2_tma_tiles) - 1)) * copy.tma_tokens;
    const int32_t token = tiles.first_token(i + (lane_ >> copy.log2_tma_tiles)) + in_tile;
    if (token + copy.tma_tokens <= tiles.visible.any_begin || token >= tiles.visible.any_end) return {0, -1};
    const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(token));
    const uint32_t in_page = static_cast<uint32_t>(token) - column * copy.page_size.divisor();
    return {pages[column], static_cast<int32_t>(in_page)};
  }

  /// Issues the warp's column blocks of a KV tile: one of each half of V, and a quarter of the RoPE part's TMA tiles.
  /// Lanes that have looked one up (`mine`) issue it. The bytes and the warp's arrivals go to the parts' barriers.
  __device__ __forceinline__ void issue_tma(const TileLoad& tile, const CUtensorMap& map, const VisibleRange& visible,
                                            const KvCopy& copy, bool has_k, bool boundary, bool mine,
                                            const TokenPlace& at, int32_t head, uint64_t policy) const {
    const TmaTileRange range = visible_tma_tiles(visible, tile.first, copy.tma_tokens);
    const int32_t bytes = copy.tma_tokens * 128;
    const int32_t number = lane_ & ((1 << copy.log2_tma_tiles) - 1);
    const uint32_t to = tile_address(tile.state) + static_cast<uint32_t>(number * bytes);
#pragma unroll
    for (int32_t part = 0; part < kKvParts; ++part) {
      const bool rope = part == kRope;
      const int32_t block = rope ? kValueColumnBlocks : part_begin(part) + warp_;
      const int32_t count = rope ? (has_k ? range.count_of(warp_) : 0) : range.end - range.begin;
      const uint32_t barrier =
          boundary && !rope ? v_landed_ + 8 * tile.state.stage : kv_full_ + kv_barrier_offset(tile.state, part);
      producer_acquire(tile.state, part);
      if (lane_ == 0) {
        ptx::mbarrier_arrive(barrier, kTmaWarpArrivals);
        ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(count * bytes));
      }
      __syncwarp();
      if (mine && (!rope || (has_k && number % kWarpgroupWarps == warp_))) {
        ptx::tma_load_5d(to + static_cast<uint32_t>(block * kColumnBlockBytes), &map, barrier, 0, at.in_page, block,
                         head, at.page, policy);
      }
    }
  }

  /// Waits for V of a boundary tile, then zeroes, scans and commits it.
  __device__ __forceinline__ void wait_and_scan(const KvTiles& tiles, const TileLoad& tile) {
    const uint32_t bit = 1u << tile.state.stage;
    ptx::mbarrier_wait(v_landed_ + 8 * tile.state.stage, (landed_phases_ & bit) != 0 ? 1 : 0);
    landed_phases_ ^= bit;
    scan(tiles, tile);
  }
  __device__ __forceinline__ void scan(const KvTiles& tiles, const TileLoad& tile) const {
    const bool found = zero_and_scan<T>(tile_address(tile.state), tiles.visible.any_begin - tile.first,
                                        tiles.visible.any_end - tile.first, tiles.needs_scan(tile.first),
                                        static_cast<int32_t>(threadIdx.x));
    const bool any = __any_sync(kAllLanes, found);
    if (lane_ == 0) storage_.nonfinite[tile.state.stage][warp_] = any ? 1 : 0;
    producer_commit(tile.state, kVLeft);
    producer_commit(tile.state, kVRight);
  }

  /// Loads keys and values of any page size, strides and alignment.
  __device__ __forceinline__ void load_by_threads(const KvTiles& tiles, const SegmentParams& segment,
                                                  const KvCopy& copy, const int32_t* pages,
                                                  const scheduler::WorkTile& work_tile) {
    const int32_t first_token = segment.paged ? 0 : segment.indptr[work_tile.kv_row];
#pragma unroll 1
    for (int32_t i = 0; i < tiles.count; ++i) {
      load_tile(tiles, i, {segment.k, segment.dtype, segment.k_strides}, true, copy.v_in_k, work_tile.kv_head, copy,
                pages, first_token);
      if (copy.v_in_k) continue;
      load_tile(tiles, i, {segment.v, segment.dtype, segment.v_strides}, false, true, work_tile.kv_head, copy, pages,
                first_token);
    }
  }

  struct Source {
    const void* data;
    DType dtype;
    const KvStrides& strides;
  };

  /// Each warp copies 16 tokens, each lane finds the place of one. Tokens that no row sees become zeros.
  __device__ __forceinline__ void load_tile(const KvTiles& tiles, int32_t i, const Source& source, bool has_k,
                                            bool has_v, int32_t head, const KvCopy& copy, const int32_t* pages,
                                            int32_t first_token) {
    const TileLoad tile{pipeline_state(num_kv_tiles_++), tiles.first_token(i), has_v};
    const int32_t token = tile.first + warp_ * 16 + lane_ % 16;
    int64_t begin = -1;
    if (token >= tiles.visible.any_begin && token < tiles.visible.any_end) {
      begin = head * source.strides.head;
      if (pages == nullptr) {
        begin += (int64_t{first_token} + token) * source.strides.token;
      } else {
        const uint32_t column = copy.page_size.quotient(static_cast<uint32_t>(token));
        const uint32_t in_page = static_cast<uint32_t>(token) - column * copy.page_size.divisor();
        begin += pages[column] * source.strides.page + in_page * source.strides.token;
      }
    }
    const bool scans = has_v && tiles.needs_scan(tile.first);
#pragma unroll 1
    for (int32_t part = 0; part < kKvParts; ++part) {
      producer_acquire(tile.state, part);
      if (part != kRope || has_k) copy_part(tile, part, source, begin, copy.aligned);
      if (scans && part != kRope) continue;
      producer_commit_copies(tile.state, part, copy.aligned);
    }
    if (!scans) return;
    ptx::cp_async_wait_all();
    ptx::named_barrier_sync(kProducerBarrier, kWarpgroupThreads);  // threads scan what others have copied
    scan(tiles, tile);
  }

  __device__ __forceinline__ void copy_part(const TileLoad& tile, int32_t part, const Source& source, int64_t begin,
                                            bool aligned) const {
    const int32_t chunks = 8 * part_size(part);  // 8 or 32: a power of two
    const int32_t log2_chunks = part == kRope ? 3 : 5;
#pragma unroll 2
    for (int32_t n = lane_; n < 16 * chunks; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n >> log2_chunks);
      const int32_t chunk = 8 * part_begin(part) + (n & (chunks - 1));
      const uint32_t target =
          tile_address(tile.state) + static_cast<uint32_t>(tile_offset(16 * warp_ + (n >> log2_chunks), chunk));
      const int64_t from = at < 0 ? 0 : at + chunk * kElementsPer16B;
      if (aligned) {
        ptx::cp_async_16(target, static_cast<const T*>(source.data) + from, at >= 0);
      } else {
        copy_upcast_16B<T>(target, source.data, source.dtype, from, at >= 0);
      }
    }
  }

  const MlaParams& params_;
  SharedStorage& storage_;
  const uint32_t smem_;
  const uint32_t kv_full_;
  const uint32_t kv_empty_;
  const uint32_t v_landed_;
  const int32_t warp_;
  const int32_t lane_;
  int32_t num_work_tiles_ = 0;
  uint32_t num_kv_tiles_ = 0;  ///< through the KV pipeline, so far
  uint32_t landed_phases_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
