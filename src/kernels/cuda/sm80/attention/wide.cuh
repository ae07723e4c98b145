#pragma once

#include "kernels/cuda/sm80/attention/row_output.cuh"
#include "kernels/cuda/sm80/attention/special_values.cuh"
#include "kernels/cuda/sm80/attention/wide_copies.cuh"

/// The wide way: each warp has `RowTiles` tiles of 16 rows of its own, all warps share the tile's keys and values.
namespace folio::inline v0::kernels::cuda::sm80 {

template <typename T, int32_t DimQk, int32_t DimV, bool Codes, int32_t RowTiles, int32_t Rows>
class WideWay : WideCopies<T, DimQk, DimV, Codes, Rows> {
  using Copies = WideCopies<T, DimQk, DimV, Codes, Rows>;
  using Copies::as_they_are_;
  using Copies::begin_copies;
  using Copies::begin_places;
  using Copies::context_;
  using Copies::copy_keys;
  using Copies::copy_values;
  using Copies::direct_;
  using Copies::facts_of;
  using Copies::info;
  using Copies::kTile;
  using Copies::lane_and_warp;
  using Copies::look_up;
  using Copies::look_up_one;
  using Copies::note_offsets;
  using Copies::note_places;
  using Copies::params_;
  using Copies::q_;
  using Copies::rows_;
  using Copies::slots;
  using Copies::thread_;
  using typename Copies::Facts;
  static constexpr int32_t kColumns = kTile / 8;
  static constexpr int32_t kSlotBytes = slot_bytes({DimQk, DimV});

 public:
  __device__ __forceinline__ WideWay(const AttentionParams& params, const ItemContext& context, RowInfo<Rows>& rows,
                                     uint32_t shared)
      : Copies(params, context, rows, shared) {}

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
    begin_state<Codes>(params_, context_, rows_, first_row_of(lane_and_warp()), state_);
    if (context_.num_tiles > 0) accumulate();
    ptx::cp_async_wait<0>();
    join_quad(state_);
    __syncthreads();  // the tiles become the place of results
    keep_results<DimV>(state_, acc_, first_row_of(lane_and_warp()), 2 * (thread_ % 4), results, rows_);
  }

 private:
  /// Tiles of keys and values take turns in the slots: keys, values, the next keys, the next values, ... While one is
  /// used, the next is there or on its way, and the one after next is asked for: two barriers a tile of tokens.
  __device__ __forceinline__ void accumulate() {
    const bool general = context_.custom || has_bias(params_);
    begin_scales(general);
    const bool prepares = general || turned_;
    begin_copies();
    const bool staged = Codes && direct_;
    const int32_t begin = context_.first_tile;
    const int32_t end = begin + context_.num_tiles * kTokens;
    begin_places(begin);
    copy_keys(begin, staged ? key_stage() : slots());
    ptx::cp_async_commit();
    copy_values(begin, staged ? value_stage() : slots() + kSlotBytes);
    ptx::cp_async_commit();
    uint32_t keys = slots();
#pragma unroll 1
    for (int32_t first = begin; first < end; first += kTile) {
      const bool more = first + kTile < end;
      if (!direct_) note_offsets(first + kTile);
      ptx::cp_async_wait<1>();
      if (staged) {
        CodeStage<DimQk, kTile>::widen(key_stage(), keys, thread_);
        __syncwarp();  // what was noted before the last products
        if (more) copy_keys(first + kTile, key_stage());
      }
      __syncthreads();  // the keys are there, the values before them were used
      const uint32_t values = slot_after(keys);
      float s[RowTiles][kColumns][4];
      multiply_keys(keys, s);
      const uint4 sight = ptx::ld_shared_16(info(offsetof(ItemContext, sight)));
      if (more && !staged) copy_keys(first + kTile, slot_after(values));  // while products are under way
      ptx::cp_async_commit();
      const bool masked = static_cast<int32_t>(sight.z) > first || static_cast<int32_t>(sight.w) < first + kTile;
      if (prepares || masked) {
        const int32_t column = first + 2 * (thread_ % 4);
        const int32_t first_row = first_row_of(lane_and_warp());
        if (prepares) prepare_scores(general, first_row, column, s);
        if (masked) mask_logits(rows_, first_row, column, s);
      }
      float scale[RowTiles][2];
      load_scales(scale);
      follow_scores<T>(state_, scale, s, acc_);
      ptx::cp_async_wait<1>();
      if (staged) {
        CodeStage<DimV, kTile>::widen(value_stage(), values, thread_);
        if (more) copy_values(first + kTile, value_stage());
      }
      __syncthreads();  // the values are there, the keys before them were used
      if ((prepares || masked) && (context_.custom || is_mixed(context_.sight, first, kTile))) {
        set_special_apart(values, first);
      }
      multiply_values(values, first, scale, s);
      if (more && !staged) copy_values(first + kTile, keys);
      if (!direct_) look_up_one(first + 3 * kTile);
      ptx::cp_async_commit();
      if (!staged) keys = slot_after(values);
    }
  }

  /// A thread's first row; the others are 8, 16, ... further.
  __device__ __forceinline__ static int32_t first_row_of(int32_t thread) {
    return thread / 32 * RowTiles * 16 + thread % 32 / 4;
  }

  /// Codes stand where the third slot would be: what is widened needs no slot to wait in.
  __device__ __forceinline__ uint32_t key_stage() const {
    return slots() + 2 * kSlotBytes;
  }
  __device__ __forceinline__ uint32_t value_stage() const {
    return key_stage() + kTile * DimQk;
  }
  static_assert(kTile * (DimQk + DimV) <= kSlotBytes);

  __device__ __forceinline__ uint32_t slot_after(uint32_t slot) const {
    return slot == slots() + (kWideSlots - 1) * kSlotBytes ? slots() : slot + kSlotBytes;
  }

  /// Scales are made positive, so that the largest score is the largest logit: see prepare_scores.
  __device__ __forceinline__ void begin_scales(bool general) {
    bool turned = false;
    const int32_t first_row = first_row_of(lane_and_warp());
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const float scale = state_.logit_scale[m][h];
        const int32_t row = first_row + 16 * m + 8 * h;
        if (thread_ % 4 == 0) rows_.logit_scale[row] = scale;
        turned = turned || (row < context_.num_rows && !(scale > 0.0f));
        if (thread_ % 4 == 0) rows_.score_scale[row] = general || !(fabsf(scale) > 0.0f) ? 1.0f : fabsf(scale);
      }
    }
    turned_ = __any_sync(kAllLanes, turned);
    __syncwarp();
  }

  __device__ __forceinline__ void load_scales(float (&scale)[RowTiles][2]) const {
    constexpr auto kScales = static_cast<uint32_t>(offsetof(RowInfo<Rows>, score_scale));
    const uint32_t at =
        q_ + tile_bytes({DimQk, DimV}) + kScales + 4 * static_cast<uint32_t>(first_row_of(lane_and_warp()));
#pragma unroll
    for (int32_t r = 0; r < 2 * RowTiles; ++r) scale[r / 2][r % 2] = __uint_as_float(ptx::ld_shared_4(at + 32 * r));
  }

  /// What few batches need before scores are multiplied with their scales. Rows whose scale is negative: scores change
  /// their sign; is 0 or NaN: they are scaled here.
  __device__ __forceinline__ void prepare_scores(bool general, int32_t first_row, int32_t column,
                                                 float (&s)[RowTiles][kColumns][4]) const {
    RowState<RowTiles> state;
#pragma unroll
    for (int32_t r = 0; r < 2 * RowTiles; ++r) state.logit_scale[r / 2][r % 2] = rows_.logit_scale[first_row + 8 * r];
    if (general) {
      to_general_logits(params_, context_, rows_, state, first_row, column, s);
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

  __device__ __forceinline__ void multiply_keys(uint32_t keys, float (&s)[RowTiles][kColumns][4]) const {
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
      }
    }
    const int32_t thread = lane_and_warp();
    const int32_t lane = thread % 32;
    const uint32_t q = anew(q_ + piece_offset(DimQk, thread / 32 * RowTiles * 16 + lane % 16, lane / 16));
    const uint32_t k = anew(keys + piece_offset(DimQk, lane % 8 + lane / 16 * 8, lane / 8 % 2));
    uint32_t a[2][RowTiles][4];
    uint32_t b[2][4];
    load_queries_of(q, 0, a[0]);
    ptx::ldmatrix_x4(b[0], k);
#pragma unroll
    for (int32_t i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int32_t n = 0; n < kColumns / 2; ++n) {
        const int32_t next = i * (kColumns / 2) + n + 1;  // what is read ahead of products
        if (next < kSteps * (kColumns / 2)) {
          ptx::ldmatrix_x4(b[next % 2],
                           advance(k, 2 * key_step(next / (kColumns / 2))) + 2 * 16 * (next % (kColumns / 2)) * DimQk);
        }
        if (n == kColumns / 2 - 1 && i + 1 < kSteps) load_queries_of(q, i + 1, a[(i + 1) % 2]);
        const uint32_t(&keys_of)[4] = b[(next - 1) % 2];
#pragma unroll
        for (int32_t m = 0; m < RowTiles; ++m) {
          ptx::mma_m16n8k16<T>(s[m][2 * n], a[i % 2][m], keys_of[0], keys_of[1]);
          ptx::mma_m16n8k16<T>(s[m][2 * n + 1], a[i % 2][m], keys_of[2], keys_of[3]);
        }
      }
    }
  }

  /// Steps of 16 components go through the product of queries and keys in an order in which those follow each other
  /// whose addresses differ by an addition: few addresses are known at a time.
  static constexpr int32_t kSteps = DimQk / 16;
  __device__ __forceinline__ static constexpr int32_t key_step(int32_t i) {
    return i % (kSteps / 4) * 4 + i / (kSteps / 4);
  }
  __device__ __forceinline__ static void load_queries_of(uint32_t q, int32_t i, uint32_t (&a)[RowTiles][4]) {
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
      ptx::ldmatrix_x4(a[m], advance(q, 2 * key_step(i)) + 2 * 16 * m * DimQk);
    }
  }

  /// Scores become weights of the product with values while the product of the weights before them is under way: a
  /// sixteenth of a step's rows and tokens is a pair of weights of a lane.
  static constexpr int32_t kPairs = RowTiles * 4;
  __device__ __forceinline__ void weigh(int32_t step, int32_t pair, const float (&scale)[RowTiles][2],
                                        const float (&s)[RowTiles][kColumns][4], uint32_t (&weights)[RowTiles][4]) {
    const int32_t m = pair / 4;
    const int32_t column = pair / 2 % 2;
    const int32_t h = pair % 2;
    weights[m][pair % 4] =
        weigh_two<T>(state_, scale, m, h, s[m][2 * step + column][2 * h], s[m][2 * step + column][2 * h + 1]);
  }

  __device__ __forceinline__ void multiply_values(uint32_t values, int32_t first, const float (&scale)[RowTiles][2],
                                                  const float (&s)[RowTiles][kColumns][4]) {
    constexpr int32_t kParts = DimV / 16;
    constexpr int32_t kValueSteps = kColumns / 2;
    const int32_t lane = lane_and_warp() % 32;
    const uint32_t v = anew(values + piece_offset(DimV, lane % 16, lane / 16));
    Facts facts;
    uint32_t b[2][4];
    uint32_t weights[2][RowTiles][4];
    ptx::ldmatrix_x4_trans(b[0], v);
#pragma unroll
    for (int32_t pair = 0; pair < kPairs; ++pair) weigh(0, pair, scale, s, weights[0]);
#pragma unroll
    for (int32_t step = 0; step < kValueSteps; ++step) {
#pragma unroll
      for (int32_t n = 0; n < kParts; ++n) {
        const int32_t next = step * kParts + n + 1;
        if (next < kValueSteps * kParts) {
          ptx::ldmatrix_x4_trans(b[next % 2], advance(v, 2 * (next % kParts)) + 2 * 16 * (next / kParts) * DimV);
        }
        const uint32_t(&values_of)[4] = b[(next - 1) % 2];
#pragma unroll
        for (int32_t m = 0; m < RowTiles; ++m) {
          ptx::mma_m16n8k16<T>(acc_[m][2 * n], weights[step % 2][m], values_of[0], values_of[1]);
          ptx::mma_m16n8k16<T>(acc_[m][2 * n + 1], weights[step % 2][m], values_of[2], values_of[3]);
        }
        if (step + 1 < kValueSteps) {
#pragma unroll
          for (int32_t pair = n * kPairs / kParts; pair < (n + 1) * kPairs / kParts; ++pair) {
            weigh(step + 1, pair, scale, s, weights[(step + 1) % 2]);
          }
        }
        if (step == kValueSteps - 1 && n == 0) facts = facts_of(first + 2 * kTile);
        if (step == kValueSteps - 1 && n == 2) note_places(first + 2 * kTile, facts);
        if (step == kValueSteps - 1 && n == 3) look_up(first + 3 * kTile, facts.common);
      }
    }
  }

  __device__ __forceinline__ void set_special_apart(uint32_t values, int32_t first) {
    if (__syncthreads_or(scan_special<T, DimV>(values, kTile, thread_, kThreads, false)) == 0) return;
    add_special<T, DimV>(params_, rows_, values, first, kTile, first_row_of(lane_and_warp()), acc_);
    __syncthreads();
    scan_special<T, DimV>(values, kTile, thread_, kThreads, true);
    __syncthreads();
  }

  static constexpr uint32_t kAllLanes = 0xffffffffu;

  RowState<RowTiles> state_;
  bool turned_;  ///< some row of the warp has a scale that is not positive
  float acc_[RowTiles][DimV / 8][4];
};

}  // namespace folio::inline v0::kernels::cuda::sm80
