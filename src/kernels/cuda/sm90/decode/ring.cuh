#pragma once

#include "kernels/cuda/sm90/decode/ahead.cuh"
#include "kernels/cuda/sm90/decode/copies.cuh"
#include "ptx/control.cuh"
#include "ptx/tma.cuh"

namespace folio::inline v0::kernels::cuda::sm90::decode {

/// A math warp's own ring of tiles, which it refills itself: it runs ahead of what the warp computes, across the ends
/// of entries and items, as far as the scheduler has published and stages are free.
template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8>
class Ring {
  static constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8)};
  static constexpr SharedLayout kLayout = shared_layout(kDims);
  static constexpr int32_t kStages = stages(kDims);
  static constexpr int32_t kStageBytes = stage_bytes(kDims);
  static constexpr int32_t kKeyBytes = half_bytes(DimQk, kDims.bytes);
  static constexpr int32_t kValueBytes = half_bytes(DimV, kDims.bytes);
  static constexpr int32_t kWarps = math_warps(kDims);
  using State = SharedState<kWarps, kStages>;

 public:
  __device__ __forceinline__ Ring(const DecodeParams& params, unsigned char* memory, State& state, int32_t warp,
                                  int32_t lane)
      : params_(params),
        state_(state),
        places_(reinterpret_cast<const TokenPlace*>(memory + kLayout.places)),
        tiles_(ptx::shared_address(memory + kLayout.ring) + static_cast<uint32_t>(warp * kStages * kStageBytes)),
        arrived_(ptx::shared_address(state.arrived[warp])),
        full_(ptx::shared_address(state.full)),
        warp_(warp),
        lane_(lane) {}

  /// Begins the copies of the first entry's first tiles, before it is published.
  __device__ __forceinline__ void begin() {
    static_assert(kStages * kWarps <= entry_tiles(kDims) && kStages * 2 <= 32);
    const Ahead ahead = look_ahead(params_, warp_, lane_, kStages, kWarps * kTileTokens);
    box_ = ahead.box;
    head_ = ahead.head;
    segment_ = ahead.segment;
#pragma unroll 1
    for (; filled_ < ahead.count; ++filled_) {
      const auto place = [&](int32_t lane) {
        return TokenPlace{__shfl_sync(kAllLanes, ahead.place.page, lane),
                          __shfl_sync(kAllLanes, ahead.place.in_page, lane)};
      };
      const TokenPlace first = place(2 * filled_);
      const TokenPlace second = place(2 * filled_ + 1);
      if (ptx::elect_one()) copy_boxes(first, second);
    }
    ahead_ = under_way_ = ahead.count;
    if (filled_ == kStages) filled_ = 0;
  }

  /// Begins copies until no stage is free or nothing more is published.
  __device__ __forceinline__ void fill() {
    while (under_way_ < kStages) {
      if (left_ == 0) {
        if (ended_ || !open()) return;
        continue;
      }
      copy();
      place_ += step_;
      ++under_way_;
      if (++filled_ == kStages) filled_ = 0;
      if (--left_ == 0) ++num_entries_;
    }
  }

  /// Waits for the next tile and returns the address of its keys, which values follow. Its copy has begun: the entry
  /// that has it is known to be published, and `fill` was called since.
  __device__ __forceinline__ uint32_t await() const {
    ptx::mbarrier_wait(arrived_ + 8 * used_, parity_);
    return tiles_ + static_cast<uint32_t>(used_ * kStageBytes);
  }

  /// The warp has done with the tile; `written`: it, or its threads' copies, wrote there.
  __device__ __forceinline__ void release(bool written) {
    if (written) ptx::fence_view_async_shared();
    __syncwarp();
    --under_way_;
    if (++used_ == kStages) {
      used_ = 0;
      parity_ ^= 1;
    }
  }

  /// The warp has computed entry number `index`: all its tiles are through, also where there were none.
  __device__ __forceinline__ void pass(int32_t index) {
    if (num_entries_ == index) ++num_entries_;
  }

 private:
  /// The next entry, if it is published: what all copies of its tiles need. What is asked for once an entry need not be
  /// fast; what is asked for every tile is a third of a warp's time if it is not.
  __device__ __forceinline__ bool open() {
    const int32_t slot = num_entries_ % kEntries;
    const bool published = ptx::mbarrier_test_wait(full_ + 8 * slot, num_entries_ / kEntries & 1);
    if (!__all_sync(kAllLanes, published)) return false;
    const Entry& entry = state_.entries[slot];
    ended_ = (entry.flags & kAllDone) != 0;
    if (ended_) return false;
    left_ = entry.num_tiles > warp_ ? (entry.num_tiles - warp_ + kWarps - 1) / kWarps : 0;
    const ItemContext& context = state_.contexts[entry.context];
    box_ = context.box;
    head_ = context.item.kv_head;
    segment_ = context.item.segment;
    const int32_t places = box_ == kLargeBox ? 1 : box_ == kSmallBox ? 2 : kTileTokens;  // of a tile
    place_ = places_ + slot * entry_tiles(kDims) * kTileTokens + warp_ * places;
    step_ = kWarps * places;
    place_ += ahead_ * step_;
    left_ -= ahead_;
    ahead_ = 0;
    if (left_ == 0) ++num_entries_;
    return true;
  }

  /// Begins the copies of one tile.
  __device__ __forceinline__ void copy() const {
    if (box_ == kSingles) {
      const uint32_t to = tiles_ + static_cast<uint32_t>(filled_ * kStageBytes);
      const uint32_t barrier = arrived_ + 8 * static_cast<uint32_t>(filled_);
      const SegmentParams& segment = params_.attention.segments[segment_];
      const bool direct = params_.direct[segment_];
      copy_tokens<T, DimQk, kFp8>(to, place_, segment.k, segment.dtype, segment.k_strides, head_, direct, lane_);
      copy_tokens<T, DimV, kFp8>(to + kKeyBytes, place_, segment.v, segment.dtype, segment.v_strides, head_, direct,
                                 lane_);
      ptx::cp_async_mbarrier_arrive(barrier);
      ptx::mbarrier_arrive(barrier);
      return;
    }
    if (ptx::elect_one()) copy_boxes(place_[0], place_[box_ == kSmallBox ? 1 : 0]);
  }

  /// By one lane, the boxes of one tile: one of all its tokens, or two of half of them.
  __device__ __forceinline__ void copy_boxes(TokenPlace first, TokenPlace second) const {
    const uint32_t to = tiles_ + static_cast<uint32_t>(filled_ * kStageBytes);
    const uint32_t barrier = arrived_ + 8 * static_cast<uint32_t>(filled_);
    const DecodeParams::Maps& maps = params_.maps[segment_];
    const uint64_t policy = ptx::evict_first_policy();
    ptx::mbarrier_arrive(barrier, kLaneArrivals - 1);
    if (box_ == kLargeBox) {
      if (first.in_page < 0) {
        ptx::mbarrier_arrive(barrier);
        return;
      }
      ptx::mbarrier_arrive_expect_tx(barrier, kStageBytes);
      ptx::tma_load_5d(to, &maps.k, barrier, 0, first.in_page, 0, head_, first.page, policy);
      ptx::tma_load_5d(to + kKeyBytes, &maps.v, barrier, 0, first.in_page, 0, head_, first.page, policy);
      return;
    }
    const uint32_t boxes = (first.in_page >= 0 ? 1 : 0) + (second.in_page >= 0 ? 1 : 0);
    ptx::mbarrier_arrive_expect_tx(barrier, boxes * (kStageBytes / 2));
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
  State& state_;
  const TokenPlace* const places_;
  const uint32_t tiles_;
  const uint32_t arrived_;
  const uint32_t full_;
  const int32_t warp_;
  const int32_t lane_;
  const TokenPlace* place_ = nullptr;  ///< of the next tile to copy
  int32_t step_ = 0;                   ///< from there to the tile after it
  int32_t left_ = 0;                   ///< tiles of the open entry that are still to be copied
  int32_t box_ = 0;                    ///< of the open entry
  int32_t head_ = 0;
  int32_t segment_ = 0;
  int32_t num_entries_ = 0;  ///< entries that are copied whole
  int32_t ahead_ = 0;        ///< tiles of the first entry whose copies were begun before it was published
  int32_t under_way_ = 0;    ///< stages that are being copied to, or computed
  int32_t filled_ = 0;       ///< the next stage to copy to
  int32_t used_ = 0;         ///< the next stage to compute
  uint32_t parity_ = 0;
  bool ended_ = false;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
