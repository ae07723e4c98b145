#pragma once

#include "kernels/cuda/sm90/prefill/mask.cuh"
#include "kernels/cuda/sm90/prefill/scheduler.cuh"
#include "ptx/control.cuh"

/// The producer warpgroup: fetches work tiles and loads Q, K and V into shared memory, as far ahead of the consumers as
/// there are stages and tile buffers. See producer_fp8.cuh and producer_fp8_mma.cuh for fp8 data.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// For K and V of the MMA's type. has_visible_bits: it also tells the consumers which tokens of a masked K tile each
/// row sees.
template <typename T, int32_t DimQk, int32_t DimV, Variant kVariant, int32_t FetchWarps>
class Producer : protected TileFetcher<T, DimQk, DimV, kVariant, FetchWarps> {
 protected:
  using Fetcher = TileFetcher<T, DimQk, DimV, kVariant, FetchWarps>;
  friend Fetcher;
  using Fetcher::commit_work_tile;
  using Fetcher::copy_q;
  using Fetcher::index_;
  using Fetcher::kBlockN;
  using Fetcher::kDims;
  using Fetcher::kLayout;
  using Fetcher::kLoadWarps;
  using Fetcher::lane_;
  using Fetcher::memory_;
  using Fetcher::params_;
  using Fetcher::q_buffer;
  using Fetcher::q_offset_;
  using Fetcher::storage_;
  using Fetcher::warp_;
  using State = PipelineState<stages(kDims)>;

 public:
  __device__ __forceinline__ Producer(const PrefillParams& params, unsigned char* memory, SharedStorage& storage)
      : Fetcher(params, memory, storage) {}

  __device__ __forceinline__ void run() {
    if constexpr (FetchWarps < kWarpgroupWarps) {
      run_apart();
    } else {
      run_as(*this);
    }
  }

 protected:
  /// Arrivals of a lane at a full barrier, of those lanes that load by TMA.
  static constexpr uint32_t kTmaLaneArrivals = kFullArrivals / (32 * kLoadWarps);

  /// Fetch warps fetch work tile n + 1 while the others load K and V of work tile n. All warps copy what TMA cannot.
  __device__ __forceinline__ void run_apart() {
    const bool is_fetch_warp = this->fetch_warp() >= 0;
    if (is_fetch_warp) this->count_ctas();
    for (tile_number_ = 0;; ++tile_number_) {
      const int32_t tile_buffer = tile_number_ % kTileBuffers;
      if (is_fetch_warp) {
        this->request_tile(tile_number_);
        this->receive_tile(tile_number_);
        this->bind_rows(tile_number_);
        this->publish_tile(tile_number_);
        if (!kLateQ && index_ >= 0) load_q(tile_buffer);
      }
      ptx::mbarrier_wait_warp(this->described_barrier(tile_buffer),
                              static_cast<uint32_t>(tile_number_ / kTileBuffers) & 1);
      const TileContext& context = storage_.contexts[tile_buffer];
      const bool all_done = context.all_done;
      const bool by_threads = context.by_threads;
      const scheduler::WorkTile work_tile = context.work_tile;
      const int32_t* const pages = context.pages;
      const KvTiles tiles(context);
      // The context belongs to the consumers from here on, and to a later work tile when they have released it.
      if (!is_fetch_warp) ptx::mbarrier_arrive(this->full_barrier(tile_buffer), kLaneArrivals);
      if (all_done) break;
      if (by_threads) {
        // Behind a work tile that TMA loads, fetch warps are ahead of the others by up to all its KV tiles, and the
        // parity of a stage's barrier tells them two neighbouring phases apart, no more.
        ptx::named_barrier_sync(kProducerBarrier, kWarpgroupThreads);
        load_by_threads(tiles, params_.attention.segments[work_tile.segment], params_.loads[work_tile.segment], pages,
                        work_tile);
      } else if (!is_fetch_warp) {
        if (tiles.count > 0)
          load_by_tma(tiles, params_.maps[work_tile.segment], params_.loads[work_tile.segment], pages,
                      work_tile.kv_head);
      } else {
        if constexpr (kLateQ) load_q(tile_buffer);
        k_state_.advance(tiles.count);
        v_state_.advance(tiles.count);
      }
    }
    if (!is_fetch_warp) return;
    if (tile_number_ > 0) this->store_output(tile_number_ - 1);
    ptx::tma_store_wait();
    if (this->fetch_warp() == 0) this->finish();
  }

  /// All warps fetch and load, in turn. `self`: this, as the class whose load_q and load_tiles are called.
  template <typename Self>
  __device__ __forceinline__ void run_as(Self& self) {
    this->count_ctas();
    do {
      prefetch_step_ = 0;
      if (tile_number_ >= 0) load_tile(self);
      while (prefetch_step_ < kPrefetchSteps) prefetch_next_tile(self);
      ++tile_number_;
    } while (index_ >= 0);
    if (tile_number_ > 0) this->store_output(tile_number_ - 1);
    ptx::tma_store_wait();
    if (warp_ == 0) this->finish();
  }

  /// All warps fetch: the next step towards the next work tile.
  static constexpr int32_t kPrefetchSteps = 6;
  template <typename Self>
  __device__ __forceinline__ void prefetch_next_tile(Self& self) {
    const int32_t number = tile_number_ + 1;
    if (prefetch_step_ == 0) {
      this->request_tile(number);
    } else if (prefetch_step_ == 1) {
      this->receive_tile(number);
    } else if (prefetch_step_ == 2) {
      this->bind_rows(number);
    } else if (prefetch_step_ == 3) {
      this->publish_tile(number);
    } else if (index_ >= 0 && prefetch_step_ == 4) {
      if constexpr (!Self::kLateQ) self.load_q(number % kTileBuffers);
    } else if (index_ >= 0) {
      find_first_tma_tiles(storage_.contexts[number % kTileBuffers]);
    }
    ++prefetch_step_;
  }

  /// Whether a step is due behind K tile number `i` of `count`. The first one is due behind the third K tile: by then
  /// the consumers work on this work tile, and the next one has a buffer. Then behind every second one, so that the
  /// pipelines fill up in between, as long as all steps are done before the last V tile is loaded.
  __device__ __forceinline__ bool is_prefetch_due(int32_t i, int32_t count) const {
    const int32_t left = kPrefetchSteps - prefetch_step_;
    return i >= 2 && left > 0 && (i % 2 == 0 || count - i <= 2 * left);
  }

  /// The KV tiles of a work tile, numbered from the last, in the order of loads. K is a tile ahead of V: GEMM0 needs it
  /// during the softmax of the tile before.
  struct KvTiles {
    int32_t last;
    int32_t count;
    VisibleRange visible;
    int32_t unmasked_begin;  ///< V tiles [unmasked_begin, unmasked_end) need no scan for NaN and Inf
    int32_t unmasked_end;
    bool all_masked;  ///< the consumers mask all tiles

    __device__ __forceinline__ explicit KvTiles(const TileContext& context)
        : last(context.first_tile + context.num_tiles - 1),
          count(context.num_tiles),
          visible(context.visible),
          unmasked_begin(max(last + 1 - visible.all_end / kBlockN, 0)),
          unmasked_end(last + 1 - (visible.all_begin + kBlockN - 1) / kBlockN),
          all_masked(kVariant == Variant::kAny || context.negate_scores) {}
    __device__ __forceinline__ int32_t first_token(int32_t i) const { return (last - i) * kBlockN; }
    __device__ __forceinline__ bool is_edge(int32_t i) const { return i < unmasked_begin || i >= unmasked_end; }
    /// Whether the consumers mask the tile. They mask the first one in any case.
    __device__ __forceinline__ bool is_masked(int32_t i) const { return i == 0 || all_masked || is_edge(i); }
  };

  /// Loads the KV tiles of the present work tile, with steps towards the next one in between.
  template <typename Self>
  __device__ __forceinline__ void load_tile(Self& self) {
    const TileContext& context = storage_.contexts[tile_number_ % kTileBuffers];
    if (context.num_tiles > 0) {
      const scheduler::WorkTile& work_tile = context.work_tile;
      self.load_tiles(KvTiles(context), params_.attention.segments[work_tile.segment], params_.loads[work_tile.segment],
                      context.pages, work_tile);
    } else if constexpr (Self::kLateQ) {
      self.load_q(tile_number_ % kTileBuffers);
    }
  }

  /// The last step: looks up the first TMA tiles in the page table. The loads complete before the tiles are issued.
  __device__ __forceinline__ void find_first_tma_tiles(const TileContext& context) {
    ptx::named_barrier_sync(kFetchBarrier, kWarpgroupThreads);  // the first thread has described the work tile
    if (context.num_tiles == 0) return;
    const scheduler::WorkTile& work_tile = context.work_tile;
    const SegmentLoad& load = params_.loads[work_tile.segment];
    if (load.tma_tokens > 0)
      first_tma_tiles_ = find_tma_tile(KvTiles(context), 0, load, context.pages,
                                       tma_tiles_shift(load.tma_tokens, kBlockN, kLoadWarps));
  }

  /// With one Q buffer, Q is loaded behind the first K tile: until then the buffer belongs to the work tile before.
  static constexpr bool kLateQ = q_buffers(kDims) < kTileBuffers;

  /// Loads Q and commits the work tile.
  __device__ __forceinline__ void load_q(int32_t tile_buffer) const {
    if (kLateQ && tile_number_ > 0) {
      const int32_t before = tile_number_ - 1;
      ptx::mbarrier_wait_warp(
          ptx::shared_address(storage_.tile_empty) + 8 * static_cast<uint32_t>(before % kTileBuffers),
          static_cast<uint32_t>(before / kTileBuffers) & 1);
    }
    const int32_t buffer = tile_buffer % q_buffers(kDims);
    const scheduler::WorkTile& work_tile = storage_.contexts[tile_buffer].work_tile;
    const auto group_size = static_cast<int32_t>(params_.group.divisor());
    const bool by_tma = params_.q_by_tma && this->has_whole_rows(work_tile);
    if (!by_tma) copy_q(buffer);
    const uint32_t barrier = this->full_barrier(tile_buffer);
    if (by_tma && this->fetch_thread() == 0) {
      ptx::mbarrier_arrive(barrier, kLaneArrivals - 1);
      ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(kConsumerWarpgroups * q_bytes(DimQk)));
      const uint64_t policy = ptx::evict_first_policy();
#pragma unroll
      for (int32_t warpgroup = 0; warpgroup < kConsumerWarpgroups; ++warpgroup) {
        const uint32_t token =
            params_.group.quotient(static_cast<uint32_t>(work_tile.row_begin + warpgroup * kWarpgroupRows));
        ptx::tma_load_5d(q_buffer(buffer) + static_cast<uint32_t>(warpgroup * q_bytes(DimQk)), &params_.q, barrier, 0,
                         work_tile.kv_head * group_size, static_cast<int32_t>(token), 0, 0, policy);
      }
    } else {
      commit_work_tile(tile_buffer);
    }
    __syncwarp();
  }

  __device__ __forceinline__ PipelineStage next_k_stage() {
    return next_stage(storage_.k_pipeline, k_state_, memory_ + kLayout.k, tile_bytes(kDims, DimQk));
  }
  __device__ __forceinline__ PipelineStage next_v_stage() {
    return next_stage(storage_.v_pipeline, v_state_, memory_ + kLayout.v, tile_bytes(kDims, DimV));
  }

  __device__ __forceinline__ void load_tiles(const KvTiles& tiles, const SegmentParams& segment,
                                             const SegmentLoad& load, const int32_t* pages,
                                             const scheduler::WorkTile& work_tile) {
    if (load.tma_tokens == 0) {
      load_by_threads(tiles, segment, load, pages, work_tile);
    } else {
      load_by_tma(tiles, params_.maps[work_tile.segment], load, pages, work_tile.kv_head);
    }
  }

  /// Pages of a multiple of eight tokens, by TMA: K0, K1, V0, K2, V1, ..., where all warps fetch with steps towards the
  /// next work tile in between.
  __device__ __forceinline__ void load_by_tma(const KvTiles& tiles, const PrefillParams::Maps& maps,
                                              const SegmentLoad& load, const int32_t* pages, int32_t head) {
    const uint64_t policy = ptx::evict_last_policy();
    TmaTileQueue queue{tma_tiles_shift(load.tma_tokens, kBlockN, kLoadWarps), -1, -1, first_tma_tiles_};
    if constexpr (FetchWarps < kWarpgroupWarps) queue.next = find_tma_tile(tiles, 0, load, pages, queue.shift);
    const auto issue_v = [&](int32_t i, int32_t at) {
      const PipelineStage stage = next_v_stage();
      issue_tma<DimV, false>(stage, tiles.is_edge(i) ? ptx::shared_address(&storage_.v_landed) : stage.full, maps.v,
                             load.tma_tokens, queue, i, at, head, policy);
      return stage;
    };
#pragma unroll 1
    for (int32_t i = 0; i <= tiles.count; ++i) {
      const bool edge = i > 0 && tiles.is_edge(i - 1);
      PipelineStage v_stage{};
      // V that is scanned is on its way while the visible bits are found.
      const bool v_first = kVariant == Variant::kMask && edge && i < tiles.count;
      if (v_first) v_stage = issue_v(i - 1, queue.here);
      if (i < tiles.count) {
        advance(queue, tiles, i, load, pages);
        const PipelineStage stage = next_k_stage();
        if (has_visible_bits(kVariant) && tiles.is_masked(i)) {
          producer_acquire(stage);
          store_visible_bits<kLoadWarps>(tiles.first_token(i), stage.index);
          issue_tma<DimQk, true>(stage, stage.full, maps.k, load.tma_tokens, queue, i, queue.here, head, policy);
        } else {
          issue_tma<DimQk, false>(stage, stage.full, maps.k, load.tma_tokens, queue, i, queue.here, head, policy);
        }
      }
      if (i == 0) {
        if constexpr (kLateQ && FetchWarps == kWarpgroupWarps) load_q(tile_number_ % kTileBuffers);
        continue;
      }
      const bool looked_up_before = i < tiles.count && (i << queue.shift & 31) == 0;
      if (!v_first) v_stage = issue_v(i - 1, looked_up_before ? queue.before : queue.here);
      if (edge) [[unlikely]] {
        if (FetchWarps == kWarpgroupWarps && prefetch_step_ == 0) {  // this step needs no buffer
          this->request_tile(tile_number_ + 1);
          ++prefetch_step_;
        }
        ptx::mbarrier_wait_warp(ptx::shared_address(&storage_.v_landed), static_cast<uint32_t>(num_edges_) & 1);
        ++num_edges_;
        scan_v_tile(tiles, i - 1, v_stage, kTmaLaneArrivals);
      }
      if constexpr (FetchWarps == kWarpgroupWarps) {
        if (is_prefetch_due(i, tiles.count)) prefetch_next_tile(*this);
      }
    }
  }

  /// Page of a TMA tile and its first atom of tokens in the page; -1: no row sees any of its tokens.
  struct TmaTile {
    int32_t page;
    int32_t atom;
  };
  /// The TMA tiles of a warp, one KV tile after the other. Each lane looks up one of the next 32, that many ahead.
  struct TmaTileQueue {
    int32_t shift;   ///< the warp issues 1 << shift TMA tiles of a KV tile
    int32_t here;    ///< the lane's coordinate in atoms of tokens, for the 32 that the last KV tile is among; -1: none
    int32_t before;  ///< for the 32 before
    TmaTile next;
  };
  /// From KV tile i - 1 to `i`.
  __device__ __forceinline__ void advance(TmaTileQueue& queue, const KvTiles& tiles, int32_t i, const SegmentLoad& load,
                                          const int32_t* pages) const {
    if ((i << queue.shift & 31) != 0) return;
    queue.before = queue.here;
    queue.here = queue.next.atom < 0 ? -1 : queue.next.page * load.atoms_per_page + queue.next.atom;
    // The load completes before it is used.
    queue.next = find_tma_tile(tiles, i + (32 >> queue.shift), load, pages, queue.shift);
  }
  __device__ __forceinline__ static TmaTile tma_tile_at(int32_t token, const SegmentLoad& load, const int32_t* pages) {
    const uint32_t column = load.page_size.quotient(static_cast<uint32_t>(token));
    const uint32_t in_page = static_cast<uint32_t>(token) - column * load.page_size.divisor();
    return {pages[column], static_cast<int32_t>(in_page / kAtomRows)};
  }
  /// Looks up a TMA tile for each lane, beginning with those of KV tile `i`.
  __device__ __forceinline__ TmaTile find_tma_tile(const KvTiles& tiles, int32_t i, const SegmentLoad& load,
                                                   const int32_t* pages, int32_t shift) const {
    const int32_t in_tile = (warp_ + kLoadWarps * (lane_ & ((1 << shift) - 1))) * load.tma_tokens;
    const int32_t token = tiles.first_token(i + (lane_ >> shift)) + in_tile;
    if (in_tile >= kBlockN || token + load.tma_tokens <= tiles.visible.any_begin || token >= tiles.visible.any_end)
      return {0, -1};
    return tma_tile_at(token, load, pages);
  }
  /// The same for fp8 data: `TmaTiles` of a KV tile, and a warp's tokens follow each other.
  template <int32_t TmaTiles>
  __device__ __forceinline__ TmaTile find_fp8_tma_tile(const KvTiles& tiles, int32_t i, const SegmentLoad& load,
                                                       const int32_t* pages) const {
    constexpr int32_t kWarpTokens = kBlockN / kWarpgroupWarps;
    constexpr int32_t kTmaTokens = kWarpTokens / TmaTiles;
    const int32_t token = tiles.first_token(i + lane_ / TmaTiles) + warp_ * kWarpTokens + lane_ % TmaTiles * kTmaTokens;
    if (token + kTmaTokens <= tiles.visible.any_begin || token >= tiles.visible.any_end) return {0, -1};
    return tma_tile_at(token, load, pages);
  }

  /// Issues the warp's TMA tiles of KV tile `i`, each by the lane that has looked it up: `at`. Only these lanes acquire
  /// the stage. One of them arrives for the warp at `barrier`; each expects its bytes. `AllLanes`: all lanes have
  /// written to the stage, and arrive.
  template <int32_t Dim, bool AllLanes>
  __device__ __forceinline__ void issue_tma(const PipelineStage& stage, uint32_t barrier, const CUtensorMap& map,
                                            int32_t tma_tokens, const TmaTileQueue& queue, int32_t i, int32_t at,
                                            int32_t head, uint64_t policy) const {
    const int32_t mine = lane_ & ((1 << queue.shift) - 1);  // number among the warp's TMA tiles
    const bool is_due = lane_ >> queue.shift == (i & ((32 >> queue.shift) - 1));
    const int32_t bytes = tma_tokens * 2 * Dim;
    if (is_due) {
      if constexpr (!AllLanes) producer_acquire(stage);
      ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(at >= 0 ? bytes : 0));
      if (at >= 0) {
        ptx::tma_load_5d(stage.tile + static_cast<uint32_t>((warp_ + kLoadWarps * mine) * bytes), &map, barrier, 0, 0,
                         0, head, at, policy);
      }
      if constexpr (AllLanes) {
        ptx::mbarrier_arrive(barrier, kTmaLaneArrivals - 1);
      } else if (mine == 0) {
        ptx::mbarrier_arrive(barrier, 32 * kTmaLaneArrivals - (1u << queue.shift));
      }
    } else if constexpr (AllLanes) {
      ptx::mbarrier_arrive(barrier, kTmaLaneArrivals);
    }
    __syncwarp();
  }

  /// Stores which tokens of the K tile that begins at `first` each row sees. By `Warps` warps, this thread its rows.
  template <int32_t Warps>
  __device__ __forceinline__ void store_visible_bits(int32_t first, uint32_t stage) const {
    constexpr int32_t kWords = kBlockN / 32;
    const RowInfo& rows = storage_.rows[tile_number_ % kTileBuffers];
    const CustomMask mask{params_.attention.custom_mask, storage_.contexts[tile_number_ % kTileBuffers].mask_bytes};
#pragma unroll
    for (int32_t r = 0; r < kBlockM / (32 * Warps); ++r) {
      const int32_t row = static_cast<int32_t>(threadIdx.x) + r * 32 * Warps;
      uint32_t visible[kWords];
      find_visible_bits(mask, rows, row, first, visible);
      const uint32_t to = memory_ + static_cast<uint32_t>(kLayout.visible_bits) +
                          4 * kWords * (stage * kBlockM + static_cast<uint32_t>(row));
#pragma unroll
      for (int32_t w = 0; w < kWords; ++w) ptx::st_shared_4(to + 4 * w, visible[w]);
    }
  }

  /// Scans V tile `i`, which is complete, for NaN and Inf, and commits it by `arrivals` of each lane. By the warps that
  /// load by TMA.
  __device__ __forceinline__ void scan_v_tile(const KvTiles& tiles, int32_t i, const PipelineStage& stage,
                                              uint32_t arrivals) const {
    constexpr int32_t kChunks = DimV / kElementsPer16B;
    constexpr int32_t kUnroll = kVariant == Variant::kMask ? 4 : 1;
    const bool nonfinite = zero_and_scan<T, kBlockN, kChunks, 32 * kLoadWarps, Fp8::kNone, kUnroll>(
        tiles.visible, tiles.first_token(i), true, static_cast<int32_t>(threadIdx.x),
        [&](int32_t token, int32_t chunk) {
          return stage.tile + static_cast<uint32_t>(tile_offset(DimV, token, chunk));
        });
    const bool any = __any_sync(kAllLanes, nonfinite);
    if (lane_ == 0) storage_.nonfinite[stage.index][warp_] = any ? 1 : 0;
    producer_commit(stage, arrivals);
  }

  /// Any other K and V, by all four warps.
  __device__ __forceinline__ void load_by_threads(const KvTiles& tiles, const SegmentParams& segment,
                                                  const SegmentLoad& load, const int32_t* pages,
                                                  const scheduler::WorkTile& work_tile) {
    const int32_t first_token = segment.paged ? 0 : segment.indptr[work_tile.kv_row];
    const int32_t head = work_tile.kv_head;
#pragma unroll 1
    for (int32_t i = 0; i <= tiles.count; ++i) {
      if (i < tiles.count) {
        const PipelineStage stage = next_k_stage();
        producer_acquire(stage);
        if (has_visible_bits(kVariant) && tiles.is_masked(i))
          store_visible_bits<kWarpgroupWarps>(tiles.first_token(i), stage.index);
        copy_tokens<DimQk>(tiles, i, stage.tile, segment.k, segment.dtype, segment.k_strides, head, load, pages,
                           first_token);
        producer_commit_copies(stage, load.is_16B_aligned);
      }
      if (i == 0) {
        if (kLateQ && this->fetch_warp() >= 0) load_q(tile_number_ % kTileBuffers);
        continue;
      }
      const PipelineStage stage = next_v_stage();
      producer_acquire(stage);
      copy_tokens<DimV>(tiles, i - 1, stage.tile, segment.v, segment.dtype, segment.v_strides, head, load, pages,
                        first_token);
      if (!tiles.is_edge(i - 1)) {
        producer_commit_copies(stage, load.is_16B_aligned);
        continue;
      }
      ptx::cp_async_wait_all();
      ptx::named_barrier_sync(kProducerBarrier, kWarpgroupThreads);  // other threads scan what this one has copied
      if (warp_ < kLoadWarps) {
        scan_v_tile(tiles, i - 1, stage, kLaneArrivals);
      } else {
        producer_commit(stage);
      }
    }
  }

  /// Where the lane's token of its warp's tokens of KV tile `i` begins; -1: no row sees it.
  __device__ __forceinline__ int64_t token_begin(const KvTiles& tiles, int32_t i, const KvStrides& strides,
                                                 int32_t head, const SegmentLoad& load, const int32_t* pages,
                                                 int32_t first_token) const {
    constexpr int32_t kWarpTokens = kBlockN / kWarpgroupWarps;
    const int32_t token = tiles.first_token(i) + warp_ * kWarpTokens + lane_;
    if (lane_ >= kWarpTokens || token < tiles.visible.any_begin || token >= tiles.visible.any_end) return -1;
    const int64_t begin = head * strides.head;
    if (pages == nullptr) return begin + (int64_t{first_token} + token) * strides.token;
    const uint32_t column = load.page_size.quotient(static_cast<uint32_t>(token));
    const uint32_t in_page = static_cast<uint32_t>(token) - column * load.page_size.divisor();
    return begin + pages[column] * strides.page + in_page * strides.token;
  }

  /// Copies a KV tile; zeros for tokens that no row sees. cp.async copies are not complete on return.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_tokens(const KvTiles& tiles, int32_t i, uint32_t tile, const void* data,
                                              DType dtype, const KvStrides& strides, int32_t head,
                                              const SegmentLoad& load, const int32_t* pages,
                                              int32_t first_token) const {
    constexpr int32_t kChunks = Dim / kElementsPer16B;
    constexpr int32_t kWarpTokens = kBlockN / kWarpgroupWarps;
    const int64_t begin = token_begin(tiles, i, strides, head, load, pages, first_token);
#pragma unroll 1
    for (int32_t n = lane_; n < kWarpTokens * kChunks; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n / kChunks);
      const uint32_t target =
          tile + static_cast<uint32_t>(tile_offset(Dim, kWarpTokens * warp_ + n / kChunks, n % kChunks));
      const int64_t from = at < 0 ? 0 : at + n % kChunks * kElementsPer16B;
      if (load.is_16B_aligned) {
        ptx::cp_async_16(target, static_cast<const T*>(data) + from, at >= 0);
      } else {
        copy_upcast_16B<T>(target, data, dtype, from, at >= 0);
      }
    }
  }

  int32_t tile_number_ = -1;        ///< of the present work tile; -1: there is none yet
  int32_t num_edges_ = 0;           ///< V tiles scanned so far
  int32_t prefetch_step_ = 0;       ///< the next step towards the next work tile
  TmaTile first_tma_tiles_{0, -1};  ///< the lane's, of the first KV tiles of the prefetched work tile
  State k_state_;
  State v_state_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
