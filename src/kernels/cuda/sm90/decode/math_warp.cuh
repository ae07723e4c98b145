#pragma once

#include "kernels/cuda/sm90/decode/ring.cuh"
#include "kernels/cuda/sm90/decode/row_end.cuh"
#include "kernels/cuda/sm90/decode/special_values.cuh"

/// A math warp: takes its tiles of every entry, keeps a state of its own, and joins it with the others' at the item's
/// end. Products have keys and values as their first operand and rows as columns: S^T = K Q^T, O^T = V^T P^T, so that
/// few rows waste little.
namespace folio::inline v0::kernels::cuda::sm90::decode {

template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
class MathWarp {
  static constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8)};
  static constexpr SharedLayout kLayout = shared_layout(kDims);
  static constexpr int32_t kSteps = DimQk / 16;
  static constexpr int32_t kWarps = math_warps(kDims);
  static constexpr int32_t kColumns = kRows / 8;  ///< of products, in steps of eight rows
  using State = SharedState<kWarps, stages(kDims)>;

 public:
  __device__ __forceinline__ MathWarp(const DecodeParams& params, unsigned char* memory, State& state)
      : params_(params.attention),
        state_(state),
        results_(reinterpret_cast<float*>(memory + kLayout.results)),
        running_(reinterpret_cast<float*>(memory + kLayout.running)),
        queries_(ptx::shared_address(memory + kLayout.queries)),
        full_(ptx::shared_address(state.full)),
        empty_(ptx::shared_address(state.empty)),
        warp_(__shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        ring_(params, memory, state, warp_, lane_) {}

  __device__ __forceinline__ void run() {
    ring_.begin();
#pragma unroll 1
    for (;;) {
      const Entry& entry = await_entry();
      if ((entry.flags & kAllDone) != 0) return;
      compute_item<kColumns>(entry.context);
    }
  }

 private:
  /// Queries are second operands of products: in registers for as long as the item lasts, where they are few enough,
  /// else read for every tile.
  static constexpr bool queries_stay(int32_t columns) {
    return kSteps * columns <= 16;
  }
  template <int32_t Columns>
  using Queries = uint32_t[kSteps][Columns][2];

  __device__ __forceinline__ const Entry& await_entry() const {
    const int32_t slot = num_entries_ % kEntries;
    ptx::mbarrier_wait(full_ + 8 * slot, num_entries_ / kEntries & 1);
    return state_.entries[slot];
  }
  /// The entry, and at an item's end its context, are no longer needed by this warp.
  __device__ __forceinline__ void return_entry() {
    ring_.pass(num_entries_);
    ptx::mbarrier_arrive(empty_ + 8 * (num_entries_ % kEntries));
    ++num_entries_;
  }

  /// An item whose first entry is there.
  template <int32_t Columns>
  __device__ __forceinline__ void compute_item(int32_t index) {
    const ItemContext& context = state_.contexts[index];
    const uint32_t queries = queries_ + static_cast<uint32_t>(index * kMaxRows * query_stride(kDims));
    Queries<Columns> q;
#pragma unroll
    for (int32_t step = 0; queries_stay(Columns) && step < kSteps; ++step) {
      load_queries<Columns>(queries, step, q[step]);
    }
    RowState<Columns> state;
    float o[DimV / 16][Columns][4];
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        state.top[n][j] = -INFINITY;
        state.sum[n][j] = 0.0f;
        state.scale[n][j] = context.scale[8 * n + lane_ % 4 * 2 + j];
      }
#pragma unroll
      for (int32_t m = 0; m < DimV / 16; ++m) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) o[m][n][i] = 0.0f;
      }
    }
    const bool custom = context.custom;
    const bool general = custom || has_bias(params_);
    const int32_t box = context.box;
    const Place place = place_in_tile(box);
    const Entry* entry = &state_.entries[num_entries_ % kEntries];
    int32_t left = entry->num_tiles - warp_;
    int32_t next = entry->first + warp_ * kTileTokens;
#pragma unroll 1
    for (;;) {
      ring_.fill();
      if (left <= 0) {
        if ((entry->flags & kItemEnds) != 0) break;
        return_entry();
        entry = &await_entry();
        left = entry->num_tiles - warp_;
        next = entry->first + warp_ * kTileTokens;
        continue;
      }
      const int32_t first = next;
      const Sight sight = context.sight;  // read anew: registers are short
      left -= kWarps;
      next += kWarps * kTileTokens;
      const uint32_t keys = ring_.await();
      const uint32_t values = keys + half_bytes(DimQk, kDims.bytes);
      float s[Columns][4];
      multiply_keys<Columns>(keys + place.key, place, queries, q, s);
      if (general) {
        to_general_logits<Columns>(params_, context, first, lane_, scratch(), s);
      } else {
#pragma unroll
        for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
          for (int32_t i = 0; i < 4; ++i) s[n][i] = __fmul_rn(s[n][i], state.scale[n][i % 2]);
        }
      }
      const bool masked = needs_mask(sight, first);
      if (masked) mask_logits<Columns>(context, first, lane_, s);
      float factor[Columns][2];
      if (to_weights<T, Columns>(state, s, factor)) {
#pragma unroll
        for (int32_t m = 0; m < DimV / 16; ++m) {
#pragma unroll
          for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
            for (int32_t i = 0; i < 4; ++i) o[m][n][i] = __fmul_rn(o[m][n][i], factor[n][i % 2]);
          }
        }
      }
      bool written = box == kSingles;
      if (masked || custom) {  // else all rows see all of it
        const bool unseen = has_unseen(sight, first);
        const bool mixed = custom || is_mixed(sight, first);
        written = written || unseen || mixed;
        const ValueTile<T, DimV, kFp8> tile_values{values, box, lane_};
        if (unseen) tile_values.clear_unseen(sight.any_begin - first, sight.any_end - first);
        if (mixed && tile_values.has_special()) {
          tile_values.template add_special<Columns>(params_, context, first, scratch(), o);
          tile_values.clear_special();
        }
      }
      multiply_values<Columns>(values + place.value, place, s, o);
      ring_.release(written);
    }
    join<Columns>(context, state, o);
    return_entry();
  }

  /// A lane's floats, 32 apart, of what the warp writes its results to at an item's end.
  __device__ __forceinline__ float* scratch() const {
    static_assert(32 * (DimV / 4) <= kResultRows * result_stride(kDims) && 4 * kColumns <= DimV / 4);
    return results_ + warp_ * kResultRows * result_stride(kDims) + lane_;
  }

  static constexpr int32_t kKeyWidth = side_by_side(DimQk, kDims.bytes);
  static constexpr int32_t kValueWidth = side_by_side(DimV, kDims.bytes);

  /// Where a lane's rows of matrices stand in a tile; see piece_offset.
  struct Place {
    uint32_t key;       ///< of keys, as they are stored
    uint32_t value;     ///< of values, to be transposed
    uint32_t key_step;  ///< from what of a token lies side by side to the next
    uint32_t value_step;
  };
  __device__ __forceinline__ Place place_in_tile(int32_t box) const {
    const int32_t matrix = lane_ / 8;
    const int32_t row = lane_ % 8;
    const bool codes = kFp8 != Fp8::kNone;
    const int32_t tokens = row + (codes ? matrix % 2 : matrix / 2) * 8;
    const int32_t rows = box == kSmallBox ? kSmallBox : kTileTokens;
    return {static_cast<uint32_t>(piece_offset(DimQk, kDims.bytes, box, row + matrix % 2 * 8, matrix / 2)),
            static_cast<uint32_t>(piece_offset(DimV, kDims.bytes, box, tokens, codes ? matrix / 2 : matrix % 2)),
            static_cast<uint32_t>(rows * kKeyWidth), static_cast<uint32_t>(rows * kValueWidth)};
  }
  /// The lane's address of 32 bytes further on, `number` times; 2 or 4 of them to the kWidth that lie side by side.
  template <int32_t kWidth>
  __device__ __forceinline__ static uint32_t advance(uint32_t address, uint32_t step, int32_t number) {
    constexpr int32_t kSteps = kWidth / 32;
    return (address + static_cast<uint32_t>(number / kSteps) * step) ^ static_cast<uint32_t>(number % kSteps * 32);
  }

  /// Queries of 16 components as second operands of `Columns` products.
  template <int32_t Columns>
  __device__ __forceinline__ void load_queries(uint32_t queries, int32_t step, uint32_t (&b)[Columns][2]) const {
    const auto row = static_cast<uint32_t>(query_stride(kDims));
    if constexpr (kFp8 != Fp8::kNone) {  // in the order of widen_keys
#pragma unroll
      for (int32_t n = 0; n < Columns; ++n) {
        const uint32_t at = queries + static_cast<uint32_t>(8 * n + lane_ / 4) * row +
                            32 * static_cast<uint32_t>(step) + 8 * static_cast<uint32_t>(lane_ % 4);
        b[n][0] = ptx::ld_shared_4(at);
        b[n][1] = ptx::ld_shared_4(at + 4);
      }
    } else if constexpr (Columns == 1) {
      const uint32_t at = queries + static_cast<uint32_t>(lane_ / 4) * row + 32 * static_cast<uint32_t>(step) +
                          4 * static_cast<uint32_t>(lane_ % 4);
      b[0][0] = ptx::ld_shared_4(at);
      b[0][1] = ptx::ld_shared_4(at + 16);
    } else {
#pragma unroll
      for (int32_t n = 0; n < Columns; n += 2) {
        uint32_t four[4];
        ptx::ldmatrix_x4(four, queries + static_cast<uint32_t>(8 * n + lane_ % 8 + lane_ / 16 * 8) * row +
                                   32 * static_cast<uint32_t>(step) + 16 * static_cast<uint32_t>(lane_ / 8 % 2));
        b[n][0] = four[0];
        b[n][1] = four[1];
        b[n + 1][0] = four[2];
        b[n + 1][1] = four[3];
      }
    }
  }

  /// Products of 16 keys with the rows. Even and odd steps are summed apart: half as long a chain.
  template <int32_t Columns>
  __device__ __forceinline__ void multiply_keys(uint32_t keys, const Place& place, uint32_t queries,
                                                const Queries<Columns>& q, float (&s)[Columns][4]) const {
    float odd[Columns][4];
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) s[n][i] = odd[n][i] = 0.0f;
    }
    const auto multiply = [&](int32_t step, const uint32_t(&a)[4]) {
      uint32_t b[Columns][2];
      if constexpr (!queries_stay(Columns)) load_queries<Columns>(queries, step, b);
#pragma unroll
      for (int32_t n = 0; n < Columns; ++n) {
        if constexpr (queries_stay(Columns)) {
          ptx::mma_m16n8k16<T>(step % 2 == 0 ? s[n] : odd[n], a, q[step][n][0], q[step][n][1]);
        } else {
          ptx::mma_m16n8k16<T>(step % 2 == 0 ? s[n] : odd[n], a, b[n][0], b[n][1]);
        }
      }
    };
    if constexpr (kFp8 == Fp8::kNone) {
#pragma unroll
      for (int32_t step = 0; step < kSteps; ++step) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, advance<kKeyWidth>(keys, place.key_step, step));
        multiply(step, a);
      }
    } else {
#pragma unroll
      for (int32_t step = 0; step < kSteps; step += 2) {
        uint32_t codes[4];
        uint32_t a[2][4];
        ptx::ldmatrix_x4(codes, advance<kKeyWidth>(keys, place.key_step, step / 2));
        widen_keys<kFp8>(codes, a);
        multiply(step, a[0]);
        multiply(step + 1, a[1]);
      }
    }
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) s[n][i] = __fadd_rn(s[n][i], odd[n][i]);
    }
  }

  template <int32_t Columns>
  __device__ __forceinline__ void multiply_values(uint32_t values, const Place& place, const float (&s)[Columns][4],
                                                  float (&o)[DimV / 16][Columns][4]) const {
    uint32_t p[Columns][2];
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
      p[n][0] = ptx::movmatrix_trans(ptx::pack_two<T>(s[n][0], s[n][1]));
      p[n][1] = ptx::movmatrix_trans(ptx::pack_two<T>(s[n][2], s[n][3]));
    }
    if constexpr (kFp8 == Fp8::kNone) {
#pragma unroll
      for (int32_t m = 0; m < DimV / 16; ++m) {
        uint32_t a[4];
        ptx::ldmatrix_x4_trans(a, advance<kValueWidth>(values, place.value_step, m));
#pragma unroll
        for (int32_t n = 0; n < Columns; ++n) ptx::mma_m16n8k16<T>(o[m][n], a, p[n][0], p[n][1]);
      }
    } else {
#pragma unroll
      for (int32_t m = 0; m < DimV / 16; m += 2) {
        uint32_t codes[4];
        uint32_t a[2][4];
        ptx::ldmatrix_x4_trans(codes, advance<kValueWidth>(values, place.value_step, m / 2));
        widen_values<kFp8>(codes, a);
#pragma unroll
        for (int32_t n = 0; n < Columns; ++n) {
          ptx::mma_m16n8k16<T>(o[m][n], a[0], p[n][0], p[n][1]);
          ptx::mma_m16n8k16<T>(o[m + 1][n], a[1], p[n][0], p[n][1]);
        }
      }
    }
  }

  /// The warps' states go to shared memory, eight rows at a time; the warps then end these.
  template <int32_t Columns>
  __device__ __forceinline__ void join(const ItemContext& context, const RowState<Columns>& state,
                                       const float (&o)[DimV / 16][Columns][4]) {
    constexpr int32_t kStride = result_stride(kDims);
#pragma unroll 1
    for (int32_t part = 0; part < Columns; ++part) {
#pragma unroll
      for (int32_t n = 0; n < Columns; ++n) {
        if (n != part) continue;
#pragma unroll
        for (int32_t j = 0; j < 2; ++j) {
          const int32_t row = lane_ % 4 * 2 + j;
          float sum = state.sum[n][j];
#pragma unroll
          for (int32_t step = 4; step < 32; step *= 2) {
            sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, step));
          }
          if (lane_ < 4) {
            state_.top[row][warp_] = state.top[n][j];
            state_.sum[row][warp_] = sum;
          }
          float* const to = results_ + (warp_ * kResultRows + row) * kStride + first_component<kFp8>(lane_);
#pragma unroll
          for (int32_t m = 0; m < DimV / 16; ++m) {
            to[16 * m] = o[m][n][j];
            to[16 * m + kSecondComponent<kFp8>] = o[m][n][2 + j];
          }
        }
      }
      ptx::named_barrier_sync(1, math_threads(kDims));
#pragma unroll 1
      for (int32_t row = part * kResultRows + warp_; row < min(context.num_rows, (part + 1) * kResultRows);
           row += kWarps) {
        end_row_of_item<DimV>(params_, state_, context, results_, row, lane_, running_);
      }
      ptx::named_barrier_sync(1, math_threads(kDims));
    }
  }

  const AttentionParams& params_;
  State& state_;
  float* const results_;
  float* const running_;  ///< see RunningRow
  const uint32_t queries_;
  const uint32_t full_;
  const uint32_t empty_;
  const int32_t warp_;
  const int32_t lane_;
  Ring<T, DimQk, DimV, kFp8> ring_;
  int32_t num_entries_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
