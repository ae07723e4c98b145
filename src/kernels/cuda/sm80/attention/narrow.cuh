#pragma once

#include "kernels/cuda/sm80/attention/wide.cuh"

/// The narrow way, for items of up to 16 rows: each warp has a quarter of every tile's tokens for itself, copies them,
/// and keeps a state of its own; the item's end joins the four in one order. Warps meet nowhere in between.
namespace folio::inline v0::kernels::cuda::sm80 {

template <typename T, int32_t DimQk, int32_t DimV, int32_t Rows>
class NarrowWay {
  static constexpr DimClass kDims{DimQk, DimV};
  static constexpr int32_t kStages = narrow_stages(kDims);
  static constexpr int32_t kShare = kTokens / kWarps;  ///< tokens of a tile that are a warp's
  static constexpr int32_t kKeyBytes = 2 * kShare * DimQk;
  static constexpr int32_t kStageBytes = 2 * kShare * (DimQk + DimV);
  static constexpr bool kHoldQueries = DimQk <= 128;  ///< in registers
  static constexpr int32_t kHeldSteps = kHoldQueries ? DimQk / 16 : 1;
  static_assert(kShare == 16);

 public:
  __device__ __forceinline__ NarrowWay(const AttentionParams& params, const ItemContext& context, RowInfo<Rows>& rows,
                                       uint32_t shared)
      : params_(params),
        context_(context),
        rows_(rows),
        thread_(thread_number()),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        q_(shared),
        ring_(q_ + 2 * kNarrowRows * DimQk + static_cast<uint32_t>(warp_ * kStages * kStageBytes)) {}

  /// One item. The queries' copy has been committed. Leaves the warps' states in `results` and rows.result.
  __device__ __forceinline__ void run(float* results) {
#pragma unroll
    for (int32_t n = 0; n < DimV / 8; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) acc_[0][n][i] = 0.0f;
    }
    begin_state(params_, context_, rows_, lane_ / 4, state_);
    if (context_.num_tiles > 0) accumulate();
    ptx::wait_copies<0>();
    join_quad(state_);
    __syncthreads();  // the rings become the place of results
    keep_results<DimV>(state_, acc_, warp_ * kNarrowRows + lane_ / 4, 2 * (lane_ % 4), results, rows_);
  }

 private:
  /// Lanes 0 to 15 look up this warp's tokens of a tile.
  __device__ __forceinline__ TokenPlace look_up(int32_t tile) const {
    if (lane_ >= kShare || tile >= context_.num_tiles) return {0, -1};
    return place_of(context_, context_.first_tile + tile * kTokens + warp_ * kShare + lane_);
  }

  /// Keys or values of this warp's share of a tile, whose tokens' places the lanes hold; of those that no row sees,
  /// zeros. `whole`: all are seen and lie one token stride apart.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_share(uint32_t to, const TokenPlace& place, bool whole, const void* from,
                                             const KvStrides& strides, int32_t head_dim) const {
    constexpr int32_t kPieces = Dim / kPiece;
    constexpr int32_t kCopies = kShare * kPieces / 32;
    constexpr uint32_t kAll = 0xffffffffu;
    const int64_t mine = offset_of(place, strides, context_.item.kv_head);
    const PieceSource source{from, context_.segment->dtype, context_.segment->wide};
    const auto target = [&](int32_t i) {
      return to + piece_offset(Dim, (i * 32 + lane_) / kPieces, (i * 32 + lane_) % kPieces);
    };
    if constexpr (32 % kPieces == 0) {
      if (whole && head_dim == Dim && source.direct()) {
        const T* piece = static_cast<const T*>(from) + __shfl_sync(kAll, mine, 0) + lane_ / kPieces * strides.token +
                         lane_ % kPieces * kPiece;
        const int64_t step = 32 / kPieces * strides.token;
#pragma unroll
        for (int32_t i = 0; i < kCopies; ++i, piece += step) ptx::copy_16_async(target(i), piece);
        return;
      }
    }
    const auto element_of = [&](int32_t i, bool& valid) {
      const int32_t d = (i * 32 + lane_) % kPieces * kPiece;
      const int64_t offset = __shfl_sync(kAll, mine, (i * 32 + lane_) / kPieces);
      valid = offset != kUnseen && d < head_dim;
      return valid ? offset + d : 0;
    };
    bool valid = false;
    if (source.direct()) {
#pragma unroll
      for (int32_t i = 0; i < kCopies; ++i) {
        const int64_t at = element_of(i, valid);
        ptx::copy_16_async(target(i), static_cast<const T*>(from) + at, valid);
      }
      return;
    }
#pragma unroll 1
    for (int32_t i = 0; i < kCopies; ++i) {
      const int64_t at = element_of(i, valid);
      copy_any_piece<T>(target(i), source, at, valid);
    }
  }
  __device__ __forceinline__ bool is_whole(int32_t tile) const {
    const int32_t first = context_.first_tile + tile * kTokens + warp_ * kShare;
    return context_.even && first >= context_.sight.any_begin && first + kShare <= context_.sight.any_end;
  }
  __device__ __forceinline__ void copy_keys(int32_t stage, const TokenPlace& place, bool whole) const {
    copy_share<DimQk>(ring_ + stage * kStageBytes, place, whole, context_.segment->k, context_.segment->k_strides,
                      params_.head_dim_qk);
    ptx::commit_copies();
  }
  __device__ __forceinline__ void copy_values(int32_t stage, const TokenPlace& place, bool whole) const {
    copy_share<DimV>(ring_ + stage * kStageBytes + kKeyBytes, place, whole, context_.segment->v,
                     context_.segment->v_strides, params_.head_dim_v);
    ptx::commit_copies();
  }

  __device__ __forceinline__ void accumulate() {
    TokenPlace place = look_up(0);
#pragma unroll 1
    for (int32_t stage = 0; stage < kStages; ++stage) {
      const TokenPlace next = look_up(stage + 1);
      copy_keys(stage, place, is_whole(stage));
      copy_values(stage, place, is_whole(stage));
      place = next;
    }
    ptx::wait_copies<2 * kStages>();
    __syncthreads();  // the queries are there
    uint32_t held[kHeldSteps][4];
    const uint32_t q = q_ + piece_offset(DimQk, lane_ % 16, lane_ / 16);
    if constexpr (kHoldQueries) {
#pragma unroll
      for (int32_t step = 0; step < kHeldSteps; ++step) ptx::load_matrices(held[step], advance(q, 2 * step));
    }
    int32_t stage = 0;
    for (int32_t tile = 0; tile < context_.num_tiles; ++tile) {
      const int32_t first = context_.first_tile + tile * kTokens + warp_ * kShare;
      const TokenPlace next = look_up(tile + kStages + 1);
      const uint32_t keys = ring_ + stage * kStageBytes;
      // Groups end in the order K, V, K, V; each wait leaves those under way that were begun after the one awaited.
      ptx::wait_copies<2 * kStages - 1>();
      __syncwarp();
      float s[1][2][4] = {};
      const uint32_t k = keys + piece_offset(DimQk, lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2);
#pragma unroll
      for (int32_t step = 0; step < DimQk / 16; ++step) {
        uint32_t b[4];
        ptx::load_matrices(b, advance(k, 2 * step));
        if constexpr (kHoldQueries) {
          ptx::multiply_add<T>(s[0][0], held[step], b[0], b[1]);
          ptx::multiply_add<T>(s[0][1], held[step], b[2], b[3]);
        } else {
          uint32_t a[4];
          ptx::load_matrices(a, advance(q, 2 * step));
          ptx::multiply_add<T>(s[0][0], a, b[0], b[1]);
          ptx::multiply_add<T>(s[0][1], a, b[2], b[3]);
        }
      }
      __syncwarp();
      const bool whole = is_whole(tile + kStages);
      copy_keys(stage, place, whole);
      weigh(first, s);
      ptx::wait_copies<2 * kStages - 1>();
      __syncwarp();
      if (context_.custom || is_mixed(context_.sight, first, kShare)) {
        set_special_apart(keys + kKeyBytes, first);
      }
      multiply_values(keys + kKeyBytes, s);
      __syncwarp();
      copy_values(stage, place, whole);
      place = next;
      if (++stage == kStages) stage = 0;
    }
  }

  __device__ __forceinline__ void weigh(int32_t first, float (&s)[1][2][4]) {
    const bool masked = context_.custom || needs_mask(context_.sight, first, kShare);
    to_logits(params_, context_, rows_, state_, lane_ / 4, first + 2 * (lane_ % 4), masked, s);
    float factor[1][2];
    if (to_weights<T>(state_, s, factor)) rescale(acc_, factor);
  }

  __device__ __forceinline__ void multiply_values(uint32_t values, const float (&s)[1][2][4]) {
    const uint32_t p[4] = {ptx::pack_two<T>(s[0][0][0], s[0][0][1]), ptx::pack_two<T>(s[0][0][2], s[0][0][3]),
                           ptx::pack_two<T>(s[0][1][0], s[0][1][1]), ptx::pack_two<T>(s[0][1][2], s[0][1][3])};
    const uint32_t v = values + piece_offset(DimV, lane_ % 16, lane_ / 16);
#pragma unroll
    for (int32_t n = 0; n < DimV / 16; ++n) {
      uint32_t b[4];
      ptx::load_matrices_transposed(b, advance(v, 2 * n));
      ptx::multiply_add<T>(acc_[0][2 * n], p, b[0], b[1]);
      ptx::multiply_add<T>(acc_[0][2 * n + 1], p, b[2], b[3]);
    }
  }

  __device__ __forceinline__ void set_special_apart(uint32_t values, int32_t first) {
    if (!__any_sync(0xffffffffu, scan_special<T, DimV>(values, kShare, lane_, 32, false))) return;
    add_special<T, DimV>(params_, rows_, values, first, kShare, lane_ / 4, acc_);
    __syncwarp();
    scan_special<T, DimV>(values, kShare, lane_, 32, true);
    __syncwarp();
  }

  const AttentionParams& params_;
  const ItemContext& context_;
  RowInfo<Rows>& rows_;
  const int32_t thread_;
  const int32_t lane_;
  const int32_t warp_;
  const uint32_t q_;
  const uint32_t ring_;
  RowState<1> state_;
  float acc_[1][DimV / 8][4];
};

}  // namespace folio::inline v0::kernels::cuda::sm80
