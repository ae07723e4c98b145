#pragma once

#include "kernels/cpu/amx/gemm.hpp"

/// The GEMMs of pairs of row blocks, MMA by MMA between the vector instructions of another tile's softmax. So the tile
/// unit and the vector units work at the same time, which out-of-order execution, over some hundred instructions, would
/// not reach.
///
/// Four MMAs are a quad: two left tiles by two right ones, into four sums (TMM0-3). The 16 pairs of tokens of half a
/// tile's softmax are four quads long, one MMA a pair. A GEMM with more quads than a row block's softmax has room for
/// issues whole ones at every step. A quad's operands are loaded beside the MMAs of the one before, each into the tile
/// register that has just been used for the last time: K and V come from L2.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

inline constexpr int32_t kQuadMmas = 4;
/// Quads beside the softmax of a row block and a KV tile, one MMA at every pair of tokens.
inline constexpr int32_t kSoftmaxQuads = kTileTokens / 2 / kQuadMmas;

/// Derived has the MMAs of a quad as mma<0>() to mma<3>(), end_quad(), the loads of the next one's operands as
/// load_operand<4>() to load_operand<7>(), and next_operands().
template <class Derived>
class OverlappedQuads {
 public:
  static constexpr bool kTakesFloat16 = true;

  /// Called with every pair of tokens; `pair` counts those of half a tile.
  FOLIO_INLINE_MEMBER void at_softmax_step(int32_t pair) {
    const int32_t step = pair % kQuadMmas;
    if (quads_left_ == 0) return;
    if (quads_at_once_ > 1) {
      const int32_t end = (step + 1) * quads_at_once_ / kQuadMmas;
      for (int32_t i = step * quads_at_once_ / kQuadMmas; i < end && quads_left_ != 0; ++i) quad();
      return;
    }
    switch (step) {
      case 0: derived().template mma<0>(); break;
      case 1: derived().template mma<1>(); break;
      case 2: derived().template mma<2>(); break;
      default: derived().template mma<3>(); next_quad();
    }
  }

 protected:
  /// Begins so many quads: those beside one row block's softmax, or of a drain. Loads the first one's operands.
  FOLIO_INLINE_MEMBER void begin_quads(int32_t quads) {
    quads_left_ = loads_left_ = quads;
    quads_at_once_ = (quads + kSoftmaxQuads - 1) / kSoftmaxQuads;
    derived().template load_operand<4>();
    derived().template load_operand<6>();
    derived().template load_operand<5>();
    derived().template load_operand<7>();
    advance_loads();
  }

  FOLIO_INLINE_MEMBER void finish_quads() {
    while (quads_left_ != 0) quad();
  }

  FOLIO_INLINE_MEMBER bool has_quads() const { return quads_left_ != 0; }

  template <int kTile>
  FOLIO_INLINE_MEMBER void load_next() {
    if (loads_left_ != 0) derived().template load_operand<kTile>();
  }

 private:
  FOLIO_INLINE_MEMBER void quad() {
    derived().template mma<0>();
    derived().template mma<1>();
    derived().template mma<2>();
    derived().template mma<3>();
    next_quad();
  }
  FOLIO_INLINE_MEMBER void next_quad() {
    if (loads_left_ != 0) advance_loads();
    --quads_left_;
    derived().end_quad();
  }
  FOLIO_INLINE_MEMBER void advance_loads() {
    --loads_left_;
    derived().next_operands();
  }
  FOLIO_INLINE_MEMBER Derived& derived() { return static_cast<Derived&>(*this); }

  int32_t quads_at_once_ = 1;  ///< in the time of four pairs of tokens
  int32_t quads_left_ = 0;
  int32_t loads_left_ = 0;  ///< of operands, which are one quad ahead
};

/// GEMM0 of a KV tile for a pair of row blocks. A quad: 32 components of 2 x 16 keys.
template <class Tiles>
class QkOverlap : public OverlappedQuads<QkOverlap<Tiles>> {
 public:
  /// Begins GEMM0 of `operands`, with the results of gemm_qk.
  FOLIO_INLINE_MEMBER void begin(const unsigned char* q, QkSteps steps, const TileOperands& operands, float* scores) {
    q_ = q;
    other_q_ = q + steps.q_tiles() * kTileBytes;
    steps_ = steps;
    keys_ = operands.keys;
    scores_ = scores;
    step_ = load_step_ = 0;
    find_operands();
    this->begin_quads(kTileTokens / (2 * kGroupTokens) * steps.count);
  }

  FOLIO_INLINE_MEMBER void drain() { this->finish_quads(); }

  template <int kMma>
  FOLIO_INLINE_MEMBER void mma() {
    if constexpr (kMma == 0) {
      if (step_ == 0) {
        Tiles::template zero<0>();
        Tiles::template zero<1>();
        Tiles::template zero<2>();
        Tiles::template zero<3>();
      }
      Tiles::template multiply_add<0, 4, 6>();
    } else if constexpr (kMma == 1) {
      Tiles::template multiply_add<1, 4, 7>();
      this->template load_next<4>();
    } else if constexpr (kMma == 2) {
      Tiles::template multiply_add<2, 5, 6>();
      this->template load_next<6>();
    } else {
      Tiles::template multiply_add<3, 5, 7>();
      this->template load_next<5>();
      this->template load_next<7>();
    }
  }

  FOLIO_INLINE_MEMBER void end_quad() {
    if (++step_ < steps_.count) return;
    constexpr int32_t kGroup = kGroupTokens * kRowBlock;
    Tiles::template store<0>(scores_, kTileRowBytes);
    Tiles::template store<1>(scores_ + kBlockScores, kTileRowBytes);
    Tiles::template store<2>(scores_ + kGroup, kTileRowBytes);
    Tiles::template store<3>(scores_ + kBlockScores + kGroup, kTileRowBytes);
    scores_ += 2 * kGroup;
    step_ = 0;
  }

  /// TMM4 and 5 are keys, TMM6 and 7 are Q.
  template <int kTile>
  FOLIO_INLINE_MEMBER void load_operand() {
    if constexpr (kTile < 6) {
      const TileSource& keys = keys_[kTile - 4];
      Tiles::template load_streaming<kTile>(keys.at + k_step_ * keys.step, keys.stride);
    } else {
      Tiles::template load<kTile>((kTile == 6 ? q_ : other_q_) + q_at_, kTileRowBytes);
    }
  }
  FOLIO_INLINE_MEMBER void next_operands() {
    if (++load_step_ == steps_.count) {
      load_step_ = 0;
      keys_ += 2;
    }
    find_operands();
  }

 private:
  FOLIO_INLINE_MEMBER void find_operands() {
    k_step_ = steps_.k(load_step_);
    q_at_ = steps_.q(load_step_) * kTileBytes;
  }

  const unsigned char* q_ = nullptr;
  const unsigned char* other_q_ = nullptr;
  const TileSource* keys_ = nullptr;
  float* scores_ = nullptr;
  QkSteps steps_{};
  int32_t step_ = 0;       ///< of the MMAs
  int32_t load_step_ = 0;  ///< of the loads
  int64_t k_step_ = 0;
  int64_t q_at_ = 0;
};

/// GEMM1 of all pending KV tiles of a pair of row blocks. A quad: half a KV tile by 2 dimension tiles. The quads of the
/// same dimensions are a chunk, over which acc stays in TMM0-3.
template <class Tiles>
class PvOverlap : public OverlappedQuads<PvOverlap<Tiles>> {
 public:
  FOLIO_INLINE_MEMBER explicit PvOverlap(const WorkTileParams& work) : work_(work) {}

  /// Begins GEMM1 for the row blocks from row `r` on. `pending` must stay until drain() clears it. Chunks are spread
  /// over the softmax of as many KV tiles as are pending.
  FOLIO_INLINE_MEMBER void begin(int32_t r, PendingPv& pending) {
    r_ = r;
    pending_ = &pending;
    quads_ = 0;
    const PvProducts products = pv_products(work_);
    for (int32_t i = 0; i < pending.count; ++i) {
      for (int32_t h = 0; h < kTileTokens / kHalfTokens; ++h) {
        const TileSource& values = pending.tiles[i]->values[h];
        if (values.at == nullptr) continue;
        for (int32_t j = 0; j < products.count; ++j) {
          operands_[quads_++] = {pending.p[i] + h * kHalfP + products.p(j),
                                 {values.at + products.v(j), values.stride, values.step}};
        }
      }
    }
    acc_ = work_.state.acc + r * work_.v_stride;
    chunks_ = chunks_left_ = quads_ == 0 ? 0 : work_.v_stride / (2 * kDimTile);
    chunks_a_tile_ = pending.count == 0 ? 0 : (chunks_ + pending.count - 1) / pending.count;
  }

  /// Begins a KV tile's share: TMM0-7 are taken until end_tile().
  FOLIO_INLINE_MEMBER void begin_tile() { begin_chunks(smaller(chunks_a_tile_, chunks_left_)); }
  FOLIO_INLINE_MEMBER void end_tile() { this->finish_quads(); }

  /// Whether KV tiles of `batch`, or sums of the row blocks from row `r` on, are still to be read.
  FOLIO_INLINE_MEMBER bool reads(const TileBatch& batch) const {
    return pending_ != nullptr && pending_->count != 0 && pending_->tiles[0] >= batch.tiles &&
           pending_->tiles[0] < batch.tiles + kBatchTiles;
  }
  FOLIO_INLINE_MEMBER bool adds_to(int32_t r) const { return r_ == r; }

  /// Computes what is left. Clears the pending KV tiles.
  FOLIO_INLINE_MEMBER void drain() {
    if (pending_ == nullptr || pending_->count == 0) return;
    begin_chunks(chunks_left_);
    this->finish_quads();
    NoPrefetch no_prefetch;
    if (work_.v_stride / kDimTile % 2 != 0) {
      pv_dim_tiles<Tiles, 2, 1>(work_.state.acc + r_ * work_.v_stride, work_.v_stride, 2 * chunks_, *pending_,
                                pv_products(work_), no_prefetch);
    }
    end_pending_pv<2>(work_, r_, *pending_);
  }

  template <int kMma>
  FOLIO_INLINE_MEMBER void mma() {
    if constexpr (kMma == 0) {
      Tiles::template multiply_add<0, 4, 6>();
    } else if constexpr (kMma == 1) {
      Tiles::template multiply_add<2, 5, 6>();
      this->template load_next<6>();
    } else if constexpr (kMma == 2) {
      Tiles::template multiply_add<1, 4, 7>();
      this->template load_next<4>();
    } else {
      Tiles::template multiply_add<3, 5, 7>();
      this->template load_next<7>();
      this->template load_next<5>();
    }
  }

  FOLIO_INLINE_MEMBER void end_quad() {
    if (++quad_ < quads_) return;
    store_acc<Tiles, 0, 2>(acc_, acc_stride());
    store_acc<Tiles, 2, 2>(acc_ + kRowBlock * work_.v_stride, acc_stride());
    acc_ += 2 * kDimTile;
    quad_ = 0;
    --chunks_left_;
    if (this->has_quads()) load_sums();
  }

  /// TMM4 and 5 are P, TMM6 and 7 are V.
  template <int kTile>
  FOLIO_INLINE_MEMBER void load_operand() {
    const Operands& from = operands_[load_quad_];
    if constexpr (kTile < 6) {
      Tiles::template load<kTile>(from.p + (kTile - 4) * kRowBlockP, kTileRowBytes);
    } else {
      Tiles::template load_streaming<kTile>(from.v.at + (kTile - 6) * from.v.step, from.v.stride);
    }
  }
  FOLIO_INLINE_MEMBER void next_operands() {
    operands_[load_quad_].v.at += 2 * operands_[load_quad_].v.step;
    if (++load_quad_ == quads_) load_quad_ = 0;
  }

 private:
  struct Operands {
    const uint16_t* p;
    TileSource v;  ///< moves from chunk to chunk
  };
  static constexpr int32_t kMaxQuads = kBatchTiles * (kTileTokens / kHalfTokens) * kMaxPvProducts;

  FOLIO_INLINE_MEMBER int64_t acc_stride() const { return int64_t{work_.v_stride} * 4; }
  FOLIO_INLINE_MEMBER void begin_chunks(int32_t chunks) {
    if (chunks == 0) return;
    load_sums();
    this->begin_quads(chunks * quads_);
  }
  FOLIO_INLINE_MEMBER void load_sums() {
    load_acc<Tiles, 0, 2>(acc_, acc_stride());
    load_acc<Tiles, 2, 2>(acc_ + kRowBlock * work_.v_stride, acc_stride());
  }
  const WorkTileParams& work_;
  PendingPv* pending_ = nullptr;
  Operands operands_[kMaxQuads];  ///< of a chunk's quads
  float* acc_ = nullptr;          ///< of the chunk
  int32_t r_ = -1;
  int32_t quads_ = 0;      ///< of a chunk
  int32_t quad_ = 0;       ///< of the MMAs
  int32_t load_quad_ = 0;  ///< of the loads
  int32_t chunks_ = 0;
  int32_t chunks_left_ = 0;
  int32_t chunks_a_tile_ = 0;
};

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
