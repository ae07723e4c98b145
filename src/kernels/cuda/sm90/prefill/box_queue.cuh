#pragma once

#include "kernels/cuda/sm90/prefill/shared_state.cuh"

/// An item's tiles in the order in which they are loaded, and where their boxes begin.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

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

/// Where boxes of a tile that this warp issues begin, in eights of tokens; -1: no row sees any of a box's tokens.
struct Boxes {
  int32_t at[kMostBoxes];
};

/// The boxes of a tile after the other. Each lane looks up one of the next 32, as many boxes ahead.
class BoxQueue {
 public:
  __device__ __forceinline__ BoxQueue(int32_t warp, int32_t lane, const Tiles& tiles, const SegmentCopy& copy,
                                      const int32_t* pages)
      : tiles_(tiles), copy_(copy), pages_(pages), warp_(warp), lane_(lane), shift_(boxes_shift(copy.box)) {
    if (copy.box > 0) find(0);
  }

  /// From tile `i` - 1 on to tile `i`.
  __device__ __forceinline__ void advance(int32_t i) {
    last_ = i;
    if ((i << shift_) % 32 != 0) return;
    before_ = here_;
    here_ = eight_ < 0 ? -1 : page_ * copy_.eights + eight_;
    find(i + (32 >> shift_));  // on its way until it is needed
  }

  /// Of tile `i`, the last or one of those before it, as many as a lookup has.
  __device__ __forceinline__ Boxes of(int32_t i) const {
    const int32_t from = (i << shift_) / 32 == (last_ << shift_) / 32 ? here_ : before_;
    Boxes boxes;
#pragma unroll
    for (int32_t b = 0; b < kMostBoxes; ++b) {
      boxes.at[b] = b < 1 << shift_ ? __shfl_sync(kAllLanes, from, (i << shift_) % 32 + b) : -1;
    }
    return boxes;
  }

 private:
  /// The lane's, of the warp's boxes from tile `i` on.
  __device__ __forceinline__ void find(int32_t i) {
    const int32_t in_tile = (warp_ + kGroupWarps * (lane_ & ((1 << shift_) - 1))) * copy_.box;
    const int32_t token = tiles_.first_token(i + (lane_ >> shift_)) + in_tile;
    eight_ = -1;
    if (in_tile >= kTokens || token + copy_.box <= tiles_.sight.any_begin || token >= tiles_.sight.any_end) return;
    const uint32_t column = copy_.page_size.quotient(static_cast<uint32_t>(token));
    const uint32_t in_page = static_cast<uint32_t>(token) - column * copy_.page_size.divisor();
    page_ = pages_[column];
    eight_ = static_cast<int32_t>(in_page / kEight);
  }

  const Tiles& tiles_;
  const SegmentCopy& copy_;
  const int32_t* const pages_;
  const int32_t warp_;
  const int32_t lane_;
  const int32_t shift_;  ///< the warp issues 1 << shift_ boxes of a tile
  int32_t last_ = 0;     ///< tile
  int32_t here_ = -1;    ///< the lane's box of those that the last tile's are among
  int32_t before_ = -1;  ///< and of those before
  int32_t page_ = 0;     ///< of the box after: page and eight of tokens in it
  int32_t eight_ = -1;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
