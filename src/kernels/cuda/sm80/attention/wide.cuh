#pragma once

#include "kernels/cuda/sm80/attention/row_output.cuh"
#include "kernels/cuda/sm80/attention/special_values.cuh"

/// The wide way: each warp has `RowTiles` tiles of 16 rows of its own, all warps share the tile's keys and values.
namespace folio::inline v0::kernels::cuda::sm80 {

/// An address that the compiler does not know: what is derived from it is computed anew in every tile, instead of
/// being kept in registers that the accumulators need.
__device__ __forceinline__ uint32_t anew(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

/// Bit 4 to 6 of an address inside 128 bytes change by XOR, the others by addition.
__device__ __forceinline__ uint32_t advance(uint32_t address, int32_t piece) {
  return (address ^ static_cast<uint32_t>((piece & 7) << 4)) + static_cast<uint32_t>((piece >> 3) << 7);
}

/// The same in rows of codes: in those of 64 or 192 bytes, only bits 4 and 5 change by XOR.
template <int32_t Dim>
__device__ __forceinline__ uint32_t advance_codes(uint32_t address, int32_t piece) {
  if constexpr (Dim % 128 == 0) return advance(address, piece);
  return (address ^ static_cast<uint32_t>((piece & 3) << 4)) + static_cast<uint32_t>((piece >> 2) << 6);
}

template <typename T, int32_t DimQk, int32_t DimV, bool Codes, int32_t RowTiles, int32_t Rows>
class WideWay {
  static constexpr int32_t kStages = wide_stages({DimQk, DimV});
  static constexpr int32_t kColumns = kWideTokens / 8;
  static constexpr int32_t kKeyBytes = 2 * kWideTokens * DimQk;
  static constexpr int32_t kStageBytes = 2 * kWideTokens * (DimQk + DimV);

 public:
  __device__ __forceinline__ WideWay(const AttentionParams& params, const ItemContext& context, RowInfo<Rows>& rows,
                                     uint32_t shared)
      : params_(params),
        context_(context),
        rows_(rows),
        q_(shared),
        stages_(shared + 2 * Rows * DimQk),
        thread_(thread_number()),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        first_row_(warp_ * RowTiles * 16 + lane_ / 4) {}

  /// One item. The queries' copy has been committed. Leaves the rows' states in `results` and rows.result.
  __device__ __forceinline__ void run(float* results) {
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < DimV / 8; ++n) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) acc_[m][n][i] = 0.0f;
      }
    }
    begin_state<Codes>(params_, context_, rows_, first_row_, state_);
    if (context_.num_tiles > 0) accumulate();
    ptx::wait_copies<0>();
    join_quad(state_);
    __syncthreads();  // the tiles become the place of results
    keep_results<DimV>(state_, acc_, first_row_, 2 * (lane_ % 4), results, rows_);
  }

 private:
  __device__ __forceinline__ void accumulate() {
    const int32_t num_tiles = context_.num_tiles * (kTokens / kWideTokens);
    const bool looks_up = thread_ < kWideTokens;
    const int32_t column = context_.first_tile + thread_;
    const bool general = context_.custom || has_bias(params_);
    TokenPlace next{0, -1};
#pragma unroll 1
    for (int32_t tile = 0; tile < kStages - 1; ++tile) {
      if (looks_up)
        rows_.offsets[tile & 1][thread_] = offsets_of(context_, place_of(context_, column + tile * kWideTokens));
      __syncthreads();
      if (tile < num_tiles) copy_tiles(tile, tile);
      ptx::commit_copies();
    }
    if (looks_up) next = place_of(context_, column + (kStages - 1) * kWideTokens);
    int32_t stage = 0;
    for (int32_t tile = 0; tile < num_tiles; ++tile) {
      const int32_t first = context_.first_tile + tile * kWideTokens;
      const int32_t ahead = tile + kStages - 1;
      if (looks_up) rows_.offsets[ahead & 1][thread_] = offsets_of(context_, next);
      ptx::wait_copies<kStages - 2>();
      __syncthreads();  // this tile is there, the one before was used
      if (ahead < num_tiles) copy_tiles(ahead, stage == 0 ? kStages - 1 : stage - 1);
      ptx::commit_copies();
      if (looks_up) next = place_of(context_, column + (ahead + 1) * kWideTokens);
      const uint32_t keys = stages_ + stage * kStageBytes;
      float s[RowTiles][kColumns][4];
      multiply_keys(keys, s);
      const bool masked = needs_mask(context_.sight, first, kWideTokens);
      to_logits(params_, context_, rows_, state_, first_row_, first + 2 * (lane_ % 4), general, masked, true, s);
      float factor[RowTiles][2];
      if (to_weights<T>(state_, true, s, factor)) rescale(acc_, factor);
      if (context_.custom || (masked && is_mixed(context_.sight, first, kWideTokens)))
        set_special_apart(keys + kKeyBytes, first);
      multiply_values(keys + kKeyBytes, s);
      if (++stage == kStages) stage = 0;
    }
  }

  /// Begins the copy of a tile whose tokens' places are known; of tokens that no row sees, zeros.
  __device__ __forceinline__ void copy_tiles(int32_t tile, int32_t stage) const {
    const SegmentParams& segment = *context_.segment;
    const TokenOffsets* const tokens = rows_.offsets[tile & 1];
    const uint32_t keys = stages_ + stage * kStageBytes;
    const int32_t first = context_.first_tile + tile * kWideTokens;
    const PieceSource k{segment.k, segment.dtype, segment.wide};
    const PieceSource v{segment.v, segment.dtype, segment.wide};
    const bool whole = k.direct() && first >= context_.sight.any_begin && first + kWideTokens <= context_.sight.any_end;
    copy_tile<T, DimQk>(keys, tokens, &TokenOffsets::k, k, params_.head_dim_qk, whole, thread_);
    copy_tile<T, DimV>(keys + kKeyBytes, tokens, &TokenOffsets::v, v, params_.head_dim_v, whole, thread_);
  }

  __device__ __forceinline__ void multiply_keys(uint32_t keys, float (&s)[RowTiles][kColumns][4]) const {
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
      }
    }
    const int32_t row = lane_ % 16;
    const uint32_t q = anew(q_ + piece_offset(DimQk, warp_ * RowTiles * 16 + row, lane_ / 16));
    const int32_t token = lane_ % 8 + lane_ / 16 * 8;
    const uint32_t k = anew(keys + piece_offset(DimQk, token, lane_ / 8 % 2));
#pragma unroll
    for (int32_t step = 0; step < DimQk / 16; ++step) {
      uint32_t a[RowTiles][4];
#pragma unroll
      for (int32_t m = 0; m < RowTiles; ++m) ptx::load_matrices(a[m], advance(q + 2 * 16 * m * DimQk, 2 * step));
#pragma unroll
      for (int32_t n = 0; n < kColumns / 2; ++n) {
        uint32_t b[4];
        ptx::load_matrices(b, advance(k + 2 * 16 * n * DimQk, 2 * step));
#pragma unroll
        for (int32_t m = 0; m < RowTiles; ++m) {
          ptx::multiply_add<T>(s[m][2 * n], a[m], b[0], b[1]);
          ptx::multiply_add<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(uint32_t values, const float (&s)[RowTiles][kColumns][4]) {
    const uint32_t v = anew(values + piece_offset(DimV, lane_ % 16, lane_ / 16));
#pragma unroll
    for (int32_t step = 0; step < kColumns / 2; ++step) {
      uint32_t a[RowTiles][4];
#pragma unroll
      for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) {
          a[m][i] = ptx::pack_two<T>(s[m][2 * step + i / 2][i % 2 * 2], s[m][2 * step + i / 2][i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int32_t n = 0; n < DimV / 16; ++n) {
        uint32_t b[4];
        ptx::load_matrices_transposed(b, advance(v + 2 * 16 * step * DimV, 2 * n));
#pragma unroll
        for (int32_t m = 0; m < RowTiles; ++m) {
          ptx::multiply_add<T>(acc_[m][2 * n], a[m], b[0], b[1]);
          ptx::multiply_add<T>(acc_[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void set_special_apart(uint32_t values, int32_t first) {
    if (__syncthreads_or(scan_special<T, DimV>(values, kWideTokens, thread_, kThreads, false)) == 0) return;
    add_special<T, DimV>(params_, rows_, values, first, kWideTokens, first_row_, acc_);
    __syncthreads();
    scan_special<T, DimV>(values, kWideTokens, thread_, kThreads, true);
    __syncthreads();
  }

  const AttentionParams& params_;
  const ItemContext& context_;
  RowInfo<Rows>& rows_;
  const uint32_t q_;
  const uint32_t stages_;
  const int32_t thread_;
  const int32_t lane_;
  const int32_t warp_;
  const int32_t first_row_;  ///< this lane's first; the others are 8, 16, ... further
  RowState<RowTiles> state_;
  float acc_[RowTiles][DimV / 8][4];
};

}  // namespace folio::inline v0::kernels::cuda::sm80
