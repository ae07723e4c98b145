#pragma once

#include "kernels/cuda/sm90/decode/producer.cuh"
#include "ptx/control.cuh"
#include "ptx/tma.cuh"

namespace folio::inline v0::kernels::cuda::sm90::decode {

/// A consumer warp's own pipeline of KV tiles. The warp is producer and consumer: before each tile it refills the
/// stages that it has released. The pipeline runs ahead across the ends of tile batches and work tiles, as far as the
/// scheduler warp has committed batches.
template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
class KvPipeline {
  static constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8), kRows};
  static constexpr SmemLayout kLayout = smem_layout(kDims);
  static constexpr int32_t kStages = stages(kDims);
  static constexpr int32_t kStageBytes = stage_bytes(kDims);
  static constexpr int32_t kKeyBytes = tile_bytes(DimQk, kDims.bytes);
  static constexpr int32_t kValueBytes = tile_bytes(DimV, kDims.bytes);
  static constexpr int32_t kWarps = consumer_warps(kDims);
  using Storage = SharedStorage<kWarps, kStages>;

 public:
  __device__ __forceinline__ KvPipeline(const DecodeParams& params, unsigned char* smem, Storage& storage, int32_t warp,
                                        int32_t lane)
      : params_(params),
        storage_(storage),
        places_(reinterpret_cast<const TokenPlace*>(smem + kLayout.places)),
        tiles_(ptx::shared_address(smem + kLayout.kv) + static_cast<uint32_t>(warp * kStages * kStageBytes)),
        kv_full_(ptx::shared_address(storage.kv_full[warp])),
        batch_full_(ptx::shared_address(storage.batch_full)),
        warp_(warp),
        lane_(lane) {}

  /// Begins the copies of the CTA's first KV tiles, before the scheduler warp has committed their batch.
  __device__ __forceinline__ void produce_first_tiles() {
    static_assert(kStages * kWarps <= batch_tiles(batch_places(kDims), kTmaHalfTile) && kStages * 2 <= 32);
    const FirstTiles tiles = locate_first_tiles(params_, warp_, lane_, kStages, kWarps * kTileTokens);
    copy_tokens_ = tiles.copy_tokens;
    head_ = tiles.head;
    segment_ = tiles.segment;
#pragma unroll 1
    for (; write_stage_ < tiles.count; ++write_stage_) {
      const auto place = [&](int32_t lane) {
        return TokenPlace{__shfl_sync(kAllLanes, tiles.place.page, lane),
                          __shfl_sync(kAllLanes, tiles.place.in_page, lane)};
      };
      const TokenPlace first = place(2 * write_stage_);
      const TokenPlace second = place(2 * write_stage_ + 1);
      if (ptx::elect_one()) tma_load(first, second);
    }
    early_tiles_ = stages_in_use_ = tiles.count;
    if (write_stage_ == kStages) write_stage_ = 0;
  }

  /// Begins copies until all stages are in use or no more batches are committed.
  __device__ __forceinline__ void produce() {
    while (stages_in_use_ < kStages) {
      if (tiles_left_ == 0) {
        if (no_more_work_ || !open_batch()) return;
        continue;
      }
      load_tile();
      place_ += step_;
      ++stages_in_use_;
      if (++write_stage_ == kStages) write_stage_ = 0;
      if (--tiles_left_ == 0) ++num_batches_;
    }
  }

  /// Waits for the next KV tile and returns the address of its keys; its values follow. The tile's batch is committed,
  /// and produce() was called since: its copy has begun.
  __device__ __forceinline__ uint32_t consumer_wait() const {
    ptx::mbarrier_wait(kv_full_ + 8 * read_stage_, parity_);
    return tiles_ + static_cast<uint32_t>(read_stage_ * kStageBytes);
  }

  /// KV tiles that refill() may load, one after the other: all stages are in use and TMA loads whole tiles.
  __device__ __forceinline__ int32_t refills() const {
    return copy_tokens_ == kTmaWholeTile && stages_in_use_ == kStages ? tiles_left_ : 0;
  }

  /// Releases the KV tile, which nobody wrote to, and loads the next one there. At most refills() times in a row; then
  /// finish_refills().
  __device__ __forceinline__ void refill() {
    __syncwarp();
    if (ptx::elect_one()) tma_load_whole(*place_, read_stage_);
    place_ += step_;
    advance_read_stage();
  }
  __device__ __forceinline__ void finish_refills(int32_t count) {
    write_stage_ = read_stage_;
    tiles_left_ -= count;
    if (tiles_left_ == 0) ++num_batches_;
  }

  /// Releases the KV tile. `written`: the warp, or copies of its threads, wrote there; TMA must see these writes.
  __device__ __forceinline__ void consumer_release(bool written) {
    if (written) ptx::fence_view_async_shared();
    __syncwarp();
    --stages_in_use_;
    advance_read_stage();
  }

  /// The warp has consumed batch number `batch`, which may have had no KV tiles for it.
  __device__ __forceinline__ void finish_batch(int32_t batch) {
    if (num_batches_ == batch) ++num_batches_;
  }

 private:
  __device__ __forceinline__ void advance_read_stage() {
    if (++read_stage_ != kStages) return;
    read_stage_ = 0;
    parity_ ^= 1;
  }

  /// The next batch, if it is committed: reads what the copies of its tiles have in common. What every tile repeats
  /// costs a third of a warp's time if it is not fast; once per batch it need not be.
  __device__ __forceinline__ bool open_batch() {
    const int32_t stage = num_batches_ % kBatchStages;
    const bool committed = ptx::mbarrier_test_wait(batch_full_ + 8 * stage, num_batches_ / kBatchStages & 1);
    if (!__all_sync(kAllLanes, committed)) return false;
    const TileBatch& batch = storage_.batches[stage];
    no_more_work_ = (batch.flags & kNoMoreWork) != 0;
    if (no_more_work_) return false;
    tiles_left_ = batch.num_tiles > warp_ ? (batch.num_tiles - warp_ + kWarps - 1) / kWarps : 0;
    const WorkTileContext& context = storage_.contexts[batch.context];
    copy_tokens_ = context.copy_tokens;
    head_ = context.work_tile.kv_head;
    segment_ = context.work_tile.segment;
    const int32_t tile_places = copy_tokens_ == kTmaWholeTile ? 1 : copy_tokens_ == kTmaHalfTile ? 2 : kTileTokens;
    place_ = places_ + stage * batch_places(kDims) + warp_ * tile_places;
    step_ = kWarps * tile_places;
    place_ += early_tiles_ * step_;
    tiles_left_ -= early_tiles_;
    early_tiles_ = 0;
    if (tiles_left_ == 0) ++num_batches_;
    return true;
  }

  /// Begins the copies of one KV tile.
  __device__ __forceinline__ void load_tile() const {
    if (copy_tokens_ == kCpAsync) {
      const uint32_t to = tiles_ + static_cast<uint32_t>(write_stage_ * kStageBytes);
      const uint32_t barrier = kv_full_ + 8 * static_cast<uint32_t>(write_stage_);
      const SegmentParams& segment = params_.attention.segments[segment_];
      const bool cp_async_16B = params_.cp_async_16B[segment_];
      if constexpr (copies_keys_with_values<DimQk, DimV, kFp8>()) {
        if (cp_async_16B) {
          cp_async_kv_tile<DimQk, kFp8>(to, place_, segment, head_, lane_);
          cp_async_arrive(barrier);
          return;
        }
      }
      copy_kv_tile<T, DimQk, kFp8>(to, place_, segment.k, segment.dtype, segment.k_strides, head_, cp_async_16B, lane_);
      copy_kv_tile<T, DimV, kFp8>(to + kKeyBytes, place_, segment.v, segment.dtype, segment.v_strides, head_,
                                  cp_async_16B, lane_);
      cp_async_arrive(barrier);
      return;
    }
    if (ptx::elect_one()) tma_load(place_[0], place_[copy_tokens_ == kTmaHalfTile ? 1 : 0]);
  }

  /// The two arrivals of every lane: at once, and when its copies are through.
  __device__ __forceinline__ static void cp_async_arrive(uint32_t barrier) {
    ptx::cp_async_mbarrier_arrive(barrier);
    ptx::mbarrier_arrive(barrier);
  }

  /// By one lane: the TMA loads of one whole KV tile. A tile that no row sees is not loaded.
  __device__ __forceinline__ void tma_load_whole(TokenPlace place, int32_t stage) const {
    const uint32_t to = tiles_ + static_cast<uint32_t>(stage * kStageBytes);
    const uint32_t barrier = kv_full_ + 8 * static_cast<uint32_t>(stage);
    ptx::mbarrier_arrive(barrier, kLaneArrivals - 1);
    if (place.in_page < 0) {
      ptx::mbarrier_arrive(barrier);
      return;
    }
    const DecodeParams::Maps& maps = params_.maps[segment_];
    const uint64_t policy = ptx::evict_first_policy();
    ptx::mbarrier_arrive_expect_tx(barrier, kStageBytes);
    ptx::tma_load_5d(to, &maps.k, barrier, 0, place.in_page, 0, head_, place.page, policy);
    ptx::tma_load_5d(to + kKeyBytes, &maps.v, barrier, 0, place.in_page, 0, head_, place.page, policy);
  }

  /// By one lane: the TMA loads of one KV tile, whole or in two halves. A half that no row sees is not loaded.
  __device__ __forceinline__ void tma_load(TokenPlace first, TokenPlace second) const {
    if (copy_tokens_ == kTmaWholeTile) return tma_load_whole(first, write_stage_);
    const uint32_t to = tiles_ + static_cast<uint32_t>(write_stage_ * kStageBytes);
    const uint32_t barrier = kv_full_ + 8 * static_cast<uint32_t>(write_stage_);
    const DecodeParams::Maps& maps = params_.maps[segment_];
    const uint64_t policy = ptx::evict_first_policy();
    ptx::mbarrier_arrive(barrier, kLaneArrivals - 1);
    const uint32_t halves = (first.in_page >= 0 ? 1 : 0) + (second.in_page >= 0 ? 1 : 0);
    ptx::mbarrier_arrive_expect_tx(barrier, halves * (kStageBytes / 2));
    if (first.in_page >= 0) {
      ptx::tma_load_5d(to, &maps.k, barrier, 0, first.in_page, 0, head_, first.page, policy);
      ptx::tma_load_5d(to + kKeyBytes, &maps.v, barrier, 0, first.in_page, 0, head_, first.page, policy);
    }
    if (second.in_page >= 0) {
      ptx::tma_load_5d(to + kKeyBytes / 2, &maps.k, barrier, 0, second.in_page, 0, head_, second.page, policy);
      ptx::tma_load_5d(to + kKeyBytes + kValueBytes / 2, &maps.v, barrier, 0, second.in_page, 0, head_, second.page,
                       policy);
    }
  }

  const DecodeParams& params_;
  Storage& storage_;
  const TokenPlace* const places_;
  const uint32_t tiles_;
  const uint32_t kv_full_;
  const uint32_t batch_full_;
  const int32_t warp_;
  const int32_t lane_;
  const TokenPlace* place_ = nullptr;  ///< of the next KV tile to load
  int32_t step_ = 0;                   ///< from there to the tile after it
  int32_t tiles_left_ = 0;             ///< KV tiles of the open batch that are still to be loaded
  int32_t copy_tokens_ = 0;            ///< of the open batch
  int32_t head_ = 0;
  int32_t segment_ = 0;
  int32_t num_batches_ = 0;    ///< batches whose KV tiles are all loaded
  int32_t early_tiles_ = 0;    ///< KV tiles of the first batch that were loaded before it was committed
  int32_t stages_in_use_ = 0;  ///< being loaded or consumed
  int32_t write_stage_ = 0;    ///< next to load to
  int32_t read_stage_ = 0;     ///< next to consume
  uint32_t parity_ = 0;
  bool no_more_work_ = false;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
