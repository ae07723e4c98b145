#pragma once

#include "kernels/cuda/sm80/attention/code_stage.cuh"
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
  static constexpr int32_t kTile = wide_tokens({DimQk, DimV});
  static constexpr int32_t kColumns = kTile / 8;
  static constexpr int32_t kGroups = kTile / 16;
  static constexpr int32_t kSlotBytes = slot_bytes({DimQk, DimV});

 public:
  __device__ __forceinline__ WideWay(const AttentionParams& params, const ItemContext& context, RowInfo<Rows>& rows,
                                     uint32_t shared)
      : params_(params),
        context_(context),
        rows_(rows),
        q_(shared),
        slots_(shared + 2 * Rows * DimQk),
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
  /// Tiles of keys and values take turns in the slots: keys, values, the next keys, the next values, ... While one is
  /// used, the next is there or on its way, and the one after next is asked for: two barriers a tile of tokens.
  __device__ __forceinline__ void accumulate() {
    const int32_t num_tiles = context_.num_tiles * (kTokens / kTile);
    const bool general = context_.custom || has_bias(params_);
    begin_scales(general);
    begin_copies();
    look_up(0);
    if (!direct_) {
      look_up_one(0);
      note_offsets(0);
      __syncthreads();
      look_up_one(1);
    }
    note_places(0);
    __syncwarp();
    look_up(1);
    const bool staged = Codes && direct_;
    copy_keys(0, staged ? key_stage() : slots_);
    ptx::commit_copies();
    copy_values(0, staged ? value_stage() : slots_ + kSlotBytes);
    ptx::commit_copies();
    note_places(1);
    look_up(2);
    uint32_t keys = slots_;
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; ++tile) {
      const int32_t first = context_.first_tile + tile * kTile;
      const bool more = tile + 1 < num_tiles;
      if (!direct_) note_offsets(tile + 1);
      ptx::wait_copies<1>();
      if (staged) {
        CodeStage<DimQk, kTile>::widen(key_stage(), keys, thread_);
        __syncwarp();  // what was noted before the last products
        if (more) copy_keys(tile + 1, key_stage());
      }
      __syncthreads();  // the keys are there, the values before them were used
      const uint32_t values = slot_after(keys);
      float s[RowTiles][kColumns][4];
      multiply_keys(keys, s);
      if (more && !staged) copy_keys(tile + 1, slot_after(values));  // while products are under way
      ptx::commit_copies();
      const int32_t column = first + 2 * (lane_ % 4);
      const bool masked = needs_mask(context_.sight, first, kTile);
      if (general || turned_) prepare_scores(general, column, s);
      if (masked) mask_logits(rows_, first_row_, column, s);
      float factor[RowTiles][2];
      if (take_in<T>(state_, scale_, s, factor)) rescale(acc_, factor);
      uint32_t weights[RowTiles][kColumns][2];
      pack(s, weights);
      ptx::wait_copies<1>();
      if (staged) {
        CodeStage<DimV, kTile>::widen(value_stage(), values, thread_);
        if (more) copy_values(tile + 1, value_stage());
      }
      __syncthreads();  // the values are there, the keys before them were used
      if (context_.custom || (masked && is_mixed(context_.sight, first, kTile))) set_special_apart(values, first);
      note_places(tile + 2);
      look_up(tile + 3);
      multiply_values(values, weights);
      if (more && !staged) copy_values(tile + 1, keys);
      ptx::commit_copies();
      if (!direct_) look_up_one(tile + 2);
      if (!staged) keys = slot_after(values);
    }
  }

  /// Codes stand where the third slot would be: what is widened needs no slot to wait in.
  __device__ __forceinline__ uint32_t key_stage() const {
    return slots_ + 2 * kSlotBytes;
  }
  __device__ __forceinline__ uint32_t value_stage() const {
    return key_stage() + kTile * DimQk;
  }
  static_assert(kTile * (DimQk + DimV) <= kSlotBytes);

  __device__ __forceinline__ uint32_t slot_after(uint32_t slot) const {
    return slot == slots_ + (kWideSlots - 1) * kSlotBytes ? slots_ : slot + kSlotBytes;
  }

  /// Scales are made positive, so that the largest score is the largest logit: see prepare_scores.
  __device__ __forceinline__ void begin_scales(bool general) {
    bool turned = false;
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const float scale = state_.logit_scale[m][h];
        const int32_t row = first_row_ + 16 * m + 8 * h;
        if (lane_ % 4 == 0) rows_.logit_scale[row] = scale;
        turned = turned || (row < context_.num_rows && !(scale > 0.0f));
        scale_[m][h] = general || !(fabsf(scale) > 0.0f) ? 1.0f : fabsf(scale);
      }
    }
    turned_ = __any_sync(kAllLanes, turned);
  }

  /// What few batches need before scores are multiplied with scale_. Rows whose scale is negative: scores change their
  /// sign; is 0 or NaN: they are scaled here.
  __device__ __forceinline__ void prepare_scores(bool general, int32_t column,
                                                 float (&s)[RowTiles][kColumns][4]) const {
    RowState<RowTiles> state;
#pragma unroll
    for (int32_t r = 0; r < 2 * RowTiles; ++r) state.logit_scale[r / 2][r % 2] = rows_.logit_scale[first_row_ + 8 * r];
    if (general) {
      to_general_logits(params_, context_, rows_, state, first_row_, column, s);
      return;
    }
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t i = 0; i < kColumns * 4; ++i) {
        const float scale = state.logit_scale[m][i / 2 % 2];
        s[m][i / 4][i % 4] *= scale > 0.0f ? 1.0f : (scale < 0.0f ? -1.0f : scale);
      }
    }
  }

  /// Most tokens can be copied as they are, from addresses that each warp finds for the tokens that it copies: four of
  /// each 16 of a tile, by eight threads each.
  __device__ __forceinline__ void begin_copies() {
    const SegmentParams& segment = params_.segments[context_.item.segment];
    direct_ = segment.wide && params_.head_dim_qk == DimQk && params_.head_dim_v == DimV &&
              (context_.pages == nullptr || context_.page_shift >= 0);
  }

  /// Begins to look up where this lane's token of those lies that its warp copies of a tile. As note_places, without
  /// branches, so that the compiler can do it among products.
  __device__ __forceinline__ void look_up(int32_t tile) {
    const int32_t token = context_.first_tile + tile * kTile + lane_ % 4 * 16 + 4 * warp_ + lane_ / 4 % 4;
    const bool seen =
        direct_ && lane_ % 4 < kGroups && token >= context_.sight.any_begin && token < context_.sight.any_end;
    const int32_t* const pages = context_.pages;
    const int32_t shift = context_.page_shift;
    next_.page = 0;
    if (seen && pages != nullptr) next_.page = pages[token >> shift];
    next_.in_page = pages != nullptr ? token & ((1 << shift) - 1) : context_.first_token + token;
    if (!seen) next_.in_page = -1;
  }

  /// Notes what was looked up of a tile, for the copies behind the next barrier: keys by half of the lanes, values by
  /// the others.
  __device__ __forceinline__ void note_places(int32_t tile) {
    const bool is_key = lane_ < 16;
    const SegmentParams& segment = params_.segments[context_.item.segment];
    const KvStrides& strides = is_key ? segment.k_strides : segment.v_strides;
    const int64_t at = next_.page * strides.page + next_.in_page * strides.token;
    const auto* const begin = static_cast<const std::byte*>(is_key ? context_.keys : context_.values);
    rows_.places[tile & 1][warp_][lane_ / 16][lane_ / 4 % 4][lane_ % 4] =
        next_.in_page < 0 ? nullptr : begin + (Codes || is_fp8(segment.dtype) ? at : 2 * at);
  }

  /// The same where tokens are looked up one by one.
  __device__ __forceinline__ void look_up_one(int32_t tile) {
    if (thread_ < kTile) one_ = place_of(context_, context_.first_tile + tile * kTile + thread_);
  }

  /// What was looked up token by token, for the copies of a tile.
  __device__ __forceinline__ void note_offsets(int32_t tile) {
    if (thread_ < kTile) rows_.offsets[tile & 1][thread_] = offsets_of(context_, one_);
  }

  __device__ __forceinline__ void copy_keys(int32_t tile, uint32_t slot) const {
    if (direct_) {
      copy_noted<DimQk>(0, tile, slot);
    } else {
      const SegmentParams& segment = params_.segments[context_.item.segment];
      copy_tokens<DimQk>({segment.k, segment.dtype, segment.wide}, &TokenOffsets::k, params_.head_dim_qk, tile, slot);
    }
  }
  __device__ __forceinline__ void copy_values(int32_t tile, uint32_t slot) const {
    if (direct_) {
      copy_noted<DimV>(1, tile, slot);
    } else {
      const SegmentParams& segment = params_.segments[context_.item.segment];
      copy_tokens<DimV>({segment.v, segment.dtype, segment.wide}, &TokenOffsets::v, params_.head_dim_v, tile, slot);
    }
  }

  /// Begins the copy of a tile's keys (0) or values (1), this thread's share of the tokens that its warp noted; of
  /// those that no row sees, zeros. fp8 is widened on the way, or, where all keys and values are codes, later.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_noted(int32_t half, int32_t tile, uint32_t slot) const {
    const auto& places = rows_.places[tile & 1][warp_][half][lane_ / 8];
    if constexpr (Codes) {
      CodeStage<Dim, kTile>::copy(slot, places, thread_);
    } else {
      constexpr int32_t kPieces = Dim / (kGroupThreads * kPiece);
      constexpr int32_t kWidth = kGroupThreads * 16;
      const int32_t first = context_.first_tile + tile * kTile;
      const bool whole = first >= context_.sight.any_begin && first + kTile <= context_.sight.any_end;
      const uint32_t to = slot + piece_offset(Dim, thread_ / kGroupThreads, thread_ % kGroupThreads);
      const int32_t in_token = 16 * (thread_ % kGroupThreads);
      const DType dtype = params_.segments[context_.item.segment].dtype;
      if (is_fp8(dtype)) {
#pragma unroll 1
        for (int32_t i = 0; i < kGroups; ++i) {
          const std::byte* const from = places[i];
          uint2 codes[kPieces];
#pragma unroll
          for (int32_t j = 0; j < kPieces; ++j) {
            codes[j] = from != nullptr ? *reinterpret_cast<const uint2*>(from + (in_token + kWidth * j) / 2) : uint2{};
          }
#pragma unroll
          for (int32_t j = 0; j < kPieces; ++j) {
            ptx::store_16(to + 32 * i * Dim + kWidth * j, widen_codes<T>(codes[j], dtype));
          }
        }
        return;
      }
      if (whole) {
        const std::byte* from[kGroups];  // read at once, not one behind each copy
#pragma unroll
        for (int32_t i = 0; i < kGroups; ++i) from[i] = places[i] + in_token;
#pragma unroll
        for (int32_t i = 0; i < kGroups; ++i) {
#pragma unroll
          for (int32_t j = 0; j < kPieces; ++j) {
            ptx::copy_16_async(to + 32 * i * Dim + kWidth * j, from[i] + kWidth * j);
          }
        }
        return;
      }
#pragma unroll 1
      for (int32_t i = 0; i < kGroups; ++i) {
        const std::byte* const from = places[i];
#pragma unroll
        for (int32_t j = 0; j < kPieces; ++j) {
          ptx::copy_16_async(to + 32 * i * Dim + kWidth * j, from + in_token + kWidth * j, from != nullptr);
        }
      }
    }
  }

  /// The same of tokens whose places were looked up one by one.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_tokens(const PieceSource& source, int64_t TokenOffsets::*half, int32_t head_dim,
                                              int32_t tile, uint32_t slot) const {
    const int32_t first = context_.first_tile + tile * kTile;
    const bool whole = source.direct() && first >= context_.sight.any_begin && first + kTile <= context_.sight.any_end;
    copy_tile<T, Dim, kTile>(slot, rows_.offsets[tile & 1], half, source, head_dim, whole, thread_);
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
      for (int32_t m = 0; m < RowTiles; ++m) ptx::load_matrices(a[m], advance(q, 2 * step) + 2 * 16 * m * DimQk);
#pragma unroll
      for (int32_t n = 0; n < kColumns / 2; ++n) {
        uint32_t b[4];
        ptx::load_matrices(b, advance(k, 2 * step) + 2 * 16 * n * DimQk);
#pragma unroll
        for (int32_t m = 0; m < RowTiles; ++m) {
          ptx::multiply_add<T>(s[m][2 * n], a[m], b[0], b[1]);
          ptx::multiply_add<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// Weights as the product with values wants them.
  __device__ __forceinline__ static void pack(const float (&s)[RowTiles][kColumns][4],
                                              uint32_t (&weights)[RowTiles][kColumns][2]) {
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int32_t h = 0; h < 2; ++h) weights[m][n][h] = ptx::pack_two<T>(s[m][n][2 * h], s[m][n][2 * h + 1]);
      }
    }
  }

  __device__ __forceinline__ void multiply_values(uint32_t values, const uint32_t (&weights)[RowTiles][kColumns][2]) {
    const uint32_t v = anew(values + piece_offset(DimV, lane_ % 16, lane_ / 16));
#pragma unroll
    for (int32_t step = 0; step < kColumns / 2; ++step) {
#pragma unroll
      for (int32_t n = 0; n < DimV / 16; ++n) {
        uint32_t b[4];
        ptx::load_matrices_transposed(b, advance(v, 2 * n) + 2 * 16 * step * DimV);
#pragma unroll
        for (int32_t m = 0; m < RowTiles; ++m) {
          const uint32_t a[4] = {weights[m][2 * step][0], weights[m][2 * step][1], weights[m][2 * step + 1][0],
                                 weights[m][2 * step + 1][1]};
          ptx::multiply_add<T>(acc_[m][2 * n], a, b[0], b[1]);
          ptx::multiply_add<T>(acc_[m][2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void set_special_apart(uint32_t values, int32_t first) {
    if (__syncthreads_or(scan_special<T, DimV>(values, kTile, thread_, kThreads, false)) == 0) return;
    add_special<T, DimV>(params_, rows_, values, first, kTile, first_row_, acc_);
    __syncthreads();
    scan_special<T, DimV>(values, kTile, thread_, kThreads, true);
    __syncthreads();
  }

  static constexpr uint32_t kAllLanes = 0xffffffffu;
  static constexpr int32_t kGroupThreads = 8;  ///< that copy one token's pieces
  static_assert(kThreads == 16 * kGroupThreads && DimQk % (8 * kPiece) == 0 && DimV % (8 * kPiece) == 0);

  const AttentionParams& params_;
  const ItemContext& context_;
  RowInfo<Rows>& rows_;
  const uint32_t q_;
  const uint32_t slots_;
  const int32_t thread_;
  const int32_t lane_;
  const int32_t warp_;
  const int32_t first_row_;  ///< this lane's first; the others are 8, 16, ... further
  bool direct_;              ///< pieces are copied as they are, from addresses noted by warps
  TokenPlace next_{0, -1};   ///< of this lane's token of the tile to be noted next
  TokenPlace one_{0, -1};    ///< the same of this thread's, where tokens are looked up one by one
  RowState<RowTiles> state_;
  float scale_[RowTiles][2];
  bool turned_;  ///< some row of the warp has a scale that is not positive
  float acc_[RowTiles][DimV / 8][4];
};

}  // namespace folio::inline v0::kernels::cuda::sm80
