#pragma once

#include "kernels/cpu/amx/attention/tile_scores.hpp"
#include "kernels/cpu/amx/attention/tile_values.hpp"

/// Products of one pair of strips in small pieces, to be issued between the vector operations of another tile's
/// softmax: the tile unit and the vector units then work at the same time, which the processor's own reordering, of
/// some hundred instructions, would not reach.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// First the next tile's scores, then the last tile's values. Both are optional. Each piece is two products.
template <class Tiles>
class TileWork {
 public:
  /// The scores of `ready`, as make_tile_scores makes them.
  FOLIO_INLINE_MEMBER void set_scores(const unsigned char* q, int32_t dim_steps, const ReadyTokens& ready,
                                      float* scores) {
    q_ = q;
    dim_steps_ = dim_steps;
    keys_ = ready.keys;
    scores_ = scores;
    groups_left_ = kTileTokens / kGroupTokens;
    dim_step_ = 0;
    second_ = false;
  }

  /// The values of `ready` by `weights`, as add_pending adds them, for whole pairs of dimension tiles.
  FOLIO_INLINE_MEMBER void set_values(float* acc, int32_t v_stride, const ReadyTokens& ready, const uint16_t* weights) {
    acc_ = acc;
    sums_stride_ = int64_t{v_stride} * 4;
    v_stride_ = v_stride;
    weights_ = weights;
    values_ = ready.values;
    last_half_ = ready.values[1].at != nullptr ? 1 : 0;
    first_half_ = ready.values[0].at != nullptr ? 0 : 1;
    half_ = first_half_;
    dims_left_ = v_stride / kDimTile / 2;
    dim_ = 0;
    right_ = false;
  }

  FOLIO_INLINE_MEMBER bool done() const { return groups_left_ == 0 && dims_left_ == 0; }
  FOLIO_INLINE_MEMBER void finish() {
    while (!done()) piece();
  }

  /// Called once for each pair of tokens: every second time is enough.
  FOLIO_INLINE_MEMBER void at_weights() {
    turn_ ^= 1;
    if (turn_ == 0) piece();
  }

 private:
  FOLIO_INLINE_MEMBER void piece() {
    if (groups_left_ != 0) {
      score_piece();
    } else if (dims_left_ != 0) {
      value_piece();
    }
  }

  FOLIO_INLINE_MEMBER void score_piece() {
    const int64_t at = dim_step_ * kTileRowBytes;
    if (!second_) {
      if (dim_step_ == 0) {
        Tiles::template zero<0>();
        Tiles::template zero<1>();
        Tiles::template zero<2>();
        Tiles::template zero<3>();
      }
      Tiles::template load<4>(keys_[0].at + at, keys_[0].stride);
      Tiles::template load<6>(q_ + dim_step_ * kTileBytes, kTileRowBytes);
      Tiles::template multiply_add<0, 4, 6>();
      Tiles::template load<7>(q_ + (dim_steps_ + dim_step_) * kTileBytes, kTileRowBytes);
      Tiles::template multiply_add<1, 4, 7>();
      second_ = true;
      return;
    }
    Tiles::template load<5>(keys_[1].at + at, keys_[1].stride);
    Tiles::template multiply_add<2, 5, 6>();
    Tiles::template multiply_add<3, 5, 7>();
    second_ = false;
    if (++dim_step_ < dim_steps_) return;
    constexpr int32_t kGroup = kGroupTokens * kStripRows;
    constexpr int32_t kStrip = kTileTokens * kStripRows;
    Tiles::template store<0>(scores_, kTileRowBytes);
    Tiles::template store<1>(scores_ + kStrip, kTileRowBytes);
    Tiles::template store<2>(scores_ + kGroup, kTileRowBytes);
    Tiles::template store<3>(scores_ + kStrip + kGroup, kTileRowBytes);
    scores_ += 2 * kGroup;
    keys_ += 2;
    groups_left_ -= 2;
    dim_step_ = 0;
  }

  FOLIO_INLINE_MEMBER void value_piece() {
    const TileRow16& values = values_[half_];
    float* const sums = acc_ + dim_;
    float* const other_sums = sums + kStripRows * v_stride_;
    const unsigned char* const from = values.at + dim_ * 2 * kElement;
    if (!right_) {
      if (half_ == first_half_) {
        Tiles::template load<0>(sums, sums_stride_);
        Tiles::template load<1>(sums + kDimTile, sums_stride_);
        Tiles::template load<2>(other_sums, sums_stride_);
        Tiles::template load<3>(other_sums + kDimTile, sums_stride_);
      }
      const uint16_t* const weights = weights_ + half_ * kHalfWeights;
      Tiles::template load<4>(weights, kTileRowBytes);
      Tiles::template load<6>(from, values.stride);
      Tiles::template multiply_add<0, 4, 6>();
      Tiles::template load<5>(weights + kStripWeights, kTileRowBytes);
      Tiles::template multiply_add<2, 5, 6>();
      right_ = true;
      return;
    }
    Tiles::template load<7>(from + kTileRowBytes, values.stride);
    Tiles::template multiply_add<1, 4, 7>();
    Tiles::template multiply_add<3, 5, 7>();
    right_ = false;
    if (++half_ <= last_half_) return;
    Tiles::template store<0>(sums, sums_stride_);
    Tiles::template store<1>(sums + kDimTile, sums_stride_);
    Tiles::template store<2>(other_sums, sums_stride_);
    Tiles::template store<3>(other_sums + kDimTile, sums_stride_);
    half_ = first_half_;
    dim_ += 2 * kDimTile;
    --dims_left_;
  }

  const unsigned char* q_ = nullptr;
  const TileRow16* keys_ = nullptr;
  float* scores_ = nullptr;
  int32_t dim_steps_ = 0;
  int32_t groups_left_ = 0;
  int32_t dim_step_ = 0;
  bool second_ = false;

  float* acc_ = nullptr;
  const uint16_t* weights_ = nullptr;
  const TileRow16* values_ = nullptr;
  int64_t sums_stride_ = 0;
  int32_t v_stride_ = 0;
  int32_t dims_left_ = 0;
  int32_t dim_ = 0;
  int32_t first_half_ = 0;
  int32_t last_half_ = 0;
  int32_t half_ = 0;
  bool right_ = false;
  uint32_t turn_ = 0;
};

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
