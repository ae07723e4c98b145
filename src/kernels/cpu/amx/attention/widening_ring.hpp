#pragma once

#include "kernels/cpu/amx/attention/ahead.hpp"

/// fp8 keys and values widened to bfloat16 a little at a time, between the products of what was widened before.
///
/// A tile that is widened as a whole when its turn comes waits three times: for memory, for the conversion, and for the
/// stores that tile loads cannot be served from. And its copies (32 KB at head_dim 128) push everything else out of L1.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

inline constexpr int32_t kPieceDims = 64;
inline constexpr int32_t kPieceBytes = kTileTokens * kPieceDims * kElement;
inline constexpr int32_t kPieceSlots = 2;

/// At most one strip of rows over pages in which 16 tokens lie together, and whole pieces.
FOLIO_INLINE bool can_be_widened(const ItemCall& call) {
  const ItemKeys& keys = call.keys;
  return holds_fp8(keys) && call.num_rows <= kStripRows && keys.pages != nullptr && keys.packed_v &&
         keys.page_size % kGroupTokens == 0 && call.head_dim_qk % kPieceDims == 0 && call.head_dim_v % kPieceDims == 0;
}

/// Every row sees all of the tile: nothing of it need be zero in a copy.
FOLIO_INLINE bool is_whole(const ReadyTokens& ready) {
  return ready.uniform && ready.tile.begin == 0 && ready.tile.end == kTileTokens;
}

/// A tile's keys and then its values, in pieces of 64 components of all 64 tokens: [token][component] of keys,
/// [pair][component][2] of values. Pieces are widened in the order in which products take them, each into the slot of
/// the one before the last: at most one piece ahead of the products. Memory is asked for a tile before it is widened,
/// into L2, evenly.
template <DType kType>
class WideningRing {
 public:
  /// `slots`: memory for kPieceSlots pieces.
  FOLIO_INLINE_MEMBER WideningRing(const ItemCall& call, unsigned char* slots)
      : call_(call),
        slots_(slots),
        key_pieces_(call.head_dim_qk / kPieceDims),
        pieces_(key_pieces_ + call.head_dim_v / kPieceDims) {}

  /// To be called for whole tiles; `next`: the whole tile that the next call is for, null if none or another comes.
  FOLIO_INLINE_MEMBER void begin_tile(ReadyTokens& ready, const Tile* next) {
    if (has_next_) {
      for (int32_t i = 0; i < 2 * kRuns; ++i) runs_[0][i] = runs_[1][i];
    } else {
      find_runs(ready.tile, runs_[0]);
      widened_ = taken_;
      batch_ = 0;
    }
    first_ = taken_;
    has_next_ = next != nullptr;
    num_asked_ = asked_run_ = asked_at_ = 0;
    if (has_next_) {
      find_runs(*next, runs_[1]);
      find_asked(next->first + kTileTokens);
    }
    set_limit();
    set_source();
    for (TileRow16& group : ready.keys) group = {slots_, kKeyStride};
    for (TileRow16& half : ready.values) half = {slots_, kPairStride};
  }
  FOLIO_INLINE_MEMBER void end_tile() {
    while (asked_run_ < num_asked_) ask();
    taken_ = first_ + pieces_;
  }

  FOLIO_INLINE_MEMBER void enter_keys(int32_t step) {
    if (step % kKeySteps == 0) take(step / kKeySteps);
  }
  FOLIO_INLINE_MEMBER void scores_made() {
    taken_ = first_ + key_pieces_;
    set_limit();
  }
  FOLIO_INLINE_MEMBER void enter_values(int32_t dim_tile) {
    if (dim_tile % kValueTiles == 0) take(key_pieces_ + dim_tile / kValueTiles);
  }
  FOLIO_INLINE_MEMBER const unsigned char* key_tile(const TileRow16*, int32_t group, int32_t step) const {
    return piece_ + group * kGroupTokens * kKeyStride + step % kKeySteps * kTileRowBytes;
  }
  FOLIO_INLINE_MEMBER const unsigned char* value_tiles(const TileRow16*, int32_t half, int32_t dim_tile) const {
    return piece_ + half * (kHalfTokens / 2) * kPairStride + dim_tile % kValueTiles * kTileRowBytes;
  }
  FOLIO_INLINE_MEMBER void at_product() {
    ask();
    widen();
    widen();
  }
  FOLIO_INLINE_MEMBER void at_weights() {
    ask();
    widen();
  }

 private:
  static constexpr int32_t kRuns = kTileTokens / kGroupTokens;
  static constexpr int32_t kLine = 64;
  static constexpr int32_t kBatchLines = 4;  ///< of codes, widened at a time
  static constexpr int32_t kRunBatches = kGroupTokens * kPieceDims / (kBatchLines * kLine);
  static constexpr int32_t kPieceBatches = kRuns * kRunBatches;
  static constexpr int32_t kKeySteps = kPieceDims / kDimStep;
  static constexpr int32_t kValueTiles = kPieceDims / kDimTile;
  static constexpr int64_t kKeyStride = kPieceDims * kElement;
  static constexpr int64_t kPairStride = 2 * kPieceDims * kElement;

  FOLIO_INLINE_MEMBER void find_runs(const Tile& tile, const unsigned char** runs) const {
    for (int32_t g = 0; g < kRuns; ++g) {
      runs[g] = key_at(call_.keys, tile.first + g * kGroupTokens);
      runs[kRuns + g] = value_at(call_.keys, tile.first + g * kGroupTokens);
    }
  }
  /// The next tile's values, and keys from token `after` on: the keys in between have been asked for.
  FOLIO_INLINE_MEMBER void find_asked(int32_t after) {
    for (int32_t g = 0; g < kRuns; ++g) asked_[num_asked_++] = runs_[1][kRuns + g];
    const int32_t end = smaller(after + kTileTokens, call_.keys.kv_end - kGroupTokens + 1);
    for (int32_t t = after; t < end; t += kGroupTokens) asked_[num_asked_++] = key_at(call_.keys, t);
  }
  FOLIO_INLINE_MEMBER void ask() {
    if (asked_run_ >= num_asked_) return;
#pragma GCC unroll 4
    for (int i = 0; i < kBatchLines; ++i) __builtin_prefetch(asked_[asked_run_] + asked_at_ + i * kLine, 0, 2);
    asked_at_ += kBatchLines * kLine;
    if (asked_at_ < kGroupTokens * (asked_run_ < kRuns ? call_.head_dim_v : call_.head_dim_qk)) return;
    asked_at_ = 0;
    ++asked_run_;
  }

  /// The products go on to a piece of the tile, and need those before it no more.
  FOLIO_INLINE_MEMBER void take(int32_t piece) {
    taken_ = first_ + piece;
    set_limit();
    while (widened_ <= taken_) widen();
    piece_ = slot(taken_);
  }
  FOLIO_INLINE_MEMBER unsigned char* slot(int32_t number) const {
    return slots_ + number % kPieceSlots * kPieceBytes;
  }
  FOLIO_INLINE_MEMBER void set_limit() {
    limit_ = smaller(taken_ + kPieceSlots, first_ + (has_next_ ? 2 : 1) * pieces_);
  }
  /// Where the codes of piece `widened_` lie: two rows of keys, or a row of pairs, are two lines of it.
  FOLIO_INLINE_MEMBER void set_source() {
    const bool of_next = widened_ - first_ >= pieces_;
    const int32_t piece = widened_ - first_ - (of_next ? pieces_ : 0);
    const bool keys = piece < key_pieces_;
    run_ = runs_[of_next ? 1 : 0] + (keys ? 0 : kRuns);
    offset_ = keys ? piece * kPieceDims : (piece - key_pieces_) * 2 * kPieceDims;
    two_lines_ = keys ? 2 * call_.keys.k_token : call_.keys.v_token;
    one_line_ = keys ? call_.keys.k_token : kLine;
  }
  FOLIO_INLINE_MEMBER void widen() {
    if (widened_ >= limit_) return;
    const Fp8Lookup lookup = Fp8Lookup::of<kType>();
    const unsigned char* const from =
        run_[batch_ / kRunBatches] + offset_ + batch_ % kRunBatches * (kBatchLines / 2) * two_lines_;
    unsigned char* const to = slot(widened_) + batch_ * kBatchLines * 2 * kLine;
#pragma GCC unroll 4
    for (int i = 0; i < kBatchLines; ++i) {
      __m512i first;
      __m512i second;
      unpack_in_order(lookup, _mm512_loadu_si512(from + i / 2 * two_lines_ + i % 2 * one_line_), first, second);
      store(to + 2 * kLine * i, first);
      store(to + 2 * kLine * i + kLine, second);
    }
    if (++batch_ < kPieceBatches) return;
    batch_ = 0;
    ++widened_;
    set_source();
  }

  const ItemCall& call_;
  unsigned char* const slots_;
  const int32_t key_pieces_;
  const int32_t pieces_;                       ///< of a tile
  const unsigned char* runs_[2][2 * kRuns];    ///< 16 tokens' keys, and values: of the tile, of the next
  const unsigned char* asked_[2 * kRuns];      ///< runs
  const unsigned char* const* run_ = nullptr;  ///< those that are being widened
  const unsigned char* piece_ = nullptr;       ///< that products read
  int64_t offset_ = 0;                         ///< of the piece in a row
  int64_t two_lines_ = 0;                      ///< bytes to the line after the next
  int64_t one_line_ = 0;                       ///< bytes from an even line to the next
  bool has_next_ = false;
  int32_t first_ = 0;    ///< number of the tile's first piece; pieces are numbered across tiles
  int32_t taken_ = 0;    ///< the piece that products have come to
  int32_t widened_ = 0;  ///< the piece that is being widened
  int32_t batch_ = 0;    ///< its next lines
  int32_t limit_ = 0;    ///< the first piece whose slot is in use
  int32_t num_asked_ = 0;
  int32_t asked_run_ = 0;
  int32_t asked_at_ = 0;
};

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
