#pragma once

#include "kernels/cuda/sm80/epilogue.cuh"
#include "kernels/cuda/sm80/nonfinite.cuh"
#include "kernels/cuda/sm80/producer.cuh"

/// Prefill path: each warp has `RowTiles` row tiles of 16, all warps share the KV tile.
namespace folio::inline v0::kernels::cuda::sm80 {

template <typename T, int32_t DimQk, int32_t DimV, bool Fp8, int32_t RowTiles, int32_t Rows>
class PrefillMainloop : PrefillProducer<T, DimQk, DimV, Fp8, Rows> {
  using Producer = PrefillProducer<T, DimQk, DimV, Fp8, Rows>;
  using Producer::choose_copies;
  using Producer::context_;
  using Producer::context_field;
  using Producer::copy_keys;
  using Producer::copy_values;
  using Producer::direct_;
  using Producer::kTile;
  using Producer::lane_and_warp;
  using Producer::load_address_terms;
  using Producer::params_;
  using Producer::prefetch_page_id;
  using Producer::prefetch_page_id_of_token;
  using Producer::prologue;
  using Producer::q_;
  using Producer::stages;
  using Producer::storage_;
  using Producer::store_addresses;
  using Producer::store_offsets;
  using Producer::thread_;
  using Producer::unconverted_;
  using typename Producer::AddressTerms;
  static constexpr int32_t kColumns = kTile / 8;
  static constexpr int32_t kStageBytes = stage_bytes({DimQk, DimV});

 public:
  __device__ __forceinline__ PrefillMainloop(const AttentionParams& params, const WorkTileContext& context,
                                             SharedStorage<Rows>& storage, uint32_t shared)
      : Producer(params, context, storage, shared) {}

  /// Computes one work tile. The copy of Q has been committed. Leaves O and the row states in `results` and
  /// storage.result.
  __device__ __forceinline__ void run(float* results) {
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < DimV / 8; ++n) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) acc_[m][n][i] = 0.0f;
      }
    }
    init_row_state<Fp8>(params_, context_, storage_, first_row_of(lane_and_warp()), state_);
    if (context_.num_tiles > 0) mainloop();
    ptx::cp_async_wait<0>();
    quad_reduce_row_sum(state_);
    __syncthreads();  // the tiles become the place of results
    store_acc_to_smem<DimV>(state_, acc_, first_row_of(lane_and_warp()), 2 * (thread_ % 4), results, storage_);
  }

 private:
  /// Iterates over KV tiles. K and V tiles rotate through the stages: K, V, next K, next V, ... While one stage is
  /// consumed, the next has arrived or is in flight and the copy of the one after is issued: two barriers a KV tile.
  __device__ __forceinline__ void mainloop() {
    const bool general = context_.custom || has_bias(params_);
    init_scales(general);
    const bool prepares = general || negate_scores_;
    choose_copies();
    const bool staged = Fp8 && direct_;
    const int32_t begin = context_.first_tile;
    const int32_t end = begin + context_.num_tiles * kKvTile;
    prologue(begin);
    copy_keys(begin, staged ? key_stage() : stages());
    ptx::cp_async_commit();
    copy_values(begin, staged ? value_stage() : stages() + kStageBytes);
    ptx::cp_async_commit();
    uint32_t keys = stages();
#pragma unroll 1
    for (int32_t first = begin; first < end; first += kTile) {
      const bool more = first + kTile < end;
      if (!direct_) store_offsets(first + kTile);
      ptx::cp_async_wait<1>();
      if (staged) {
        Fp8Stage<DimQk, kTile>::dequantize(key_stage(), keys, thread_);
        __syncwarp();  // addresses stored during the last GEMM1
        if (more) copy_keys(first + kTile, key_stage());
      }
      __syncthreads();  // K has arrived; V of the tile before is consumed
      const uint32_t values = next_stage(keys);
      float s[RowTiles][kColumns][4];
      gemm0(keys, s);
      const uint4 visible_range = ptx::ld_shared_16(context_field(offsetof(WorkTileContext, visible_range)));
      if (more && !staged) copy_keys(first + kTile, next_stage(values));  // while MMAs run
      ptx::cp_async_commit();
      const bool masked =
          static_cast<int32_t>(visible_range.z) > first || static_cast<int32_t>(visible_range.w) < first + kTile;
      if (prepares || masked) {
        const int32_t column = first + 2 * (thread_ % 4);
        const int32_t first_row = first_row_of(lane_and_warp());
        if (prepares) prepare_scores(general, first_row, column, s);
        if (masked) apply_mask(storage_, first_row, column, s);
      }
      float scale[RowTiles][2];
      load_scales(scale);
      update_row_max_lazily<T>(state_, scale, s, acc_);
      ptx::cp_async_wait<1>();
      if (staged) {
        Fp8Stage<DimV, kTile>::dequantize(value_stage(), values, thread_);
        if (more) copy_values(first + kTile, value_stage());
      }
      __syncthreads();  // V has arrived; K is consumed
      if ((prepares || masked) && (context_.custom || is_mixed(context_.visible_range, first, kTile))) {
        isolate_nonfinite(values, first);
      }
      gemm1(values, first, scale, s);
      if (more && !staged) copy_values(first + kTile, keys);
      if (!direct_) prefetch_page_id_of_token(first + 3 * kTile);
      ptx::cp_async_commit();
      if (!staged) keys = next_stage(values);
    }
  }

  /// A thread's first row; the others are 8, 16, ... further.
  __device__ __forceinline__ static int32_t first_row_of(int32_t thread) {
    return thread / 32 * RowTiles * 16 + thread % 32 / 4;
  }

  /// fp8 data is staged where the third stage would be: dequantized tiles need no stage to wait in.
  __device__ __forceinline__ uint32_t key_stage() const {
    return stages() + 2 * kStageBytes;
  }
  __device__ __forceinline__ uint32_t value_stage() const {
    return key_stage() + kTile * DimQk;
  }
  static_assert(kTile * (DimQk + DimV) <= kStageBytes);

  __device__ __forceinline__ uint32_t next_stage(uint32_t stage) const {
    return stage == stages() + (kPrefillStages - 1) * kStageBytes ? stages() : stage + kStageBytes;
  }

  /// Makes scales positive, so that the largest score is the largest logit: see prepare_scores.
  __device__ __forceinline__ void init_scales(bool general) {
    bool negate = false;
    const int32_t first_row = first_row_of(lane_and_warp());
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const float scale = state_.logit_scale[m][h];
        const int32_t row = first_row + 16 * m + 8 * h;
        if (thread_ % 4 == 0) storage_.logit_scale[row] = scale;
        negate = negate || (row < context_.num_rows && !(scale > 0.0f));
        if (thread_ % 4 == 0) storage_.score_scale[row] = general || !(fabsf(scale) > 0.0f) ? 1.0f : fabsf(scale);
      }
    }
    negate_scores_ = __any_sync(kAllLanes, negate);
    __syncwarp();
  }

  __device__ __forceinline__ void load_scales(float (&scale)[RowTiles][2]) const {
    constexpr auto kScales = static_cast<uint32_t>(offsetof(SharedStorage<Rows>, score_scale));
    const uint32_t at =
        q_ + tile_bytes({DimQk, DimV}) + kScales + 4 * static_cast<uint32_t>(first_row_of(lane_and_warp()));
#pragma unroll
    for (int32_t r = 0; r < 2 * RowTiles; ++r) scale[r / 2][r % 2] = __uint_as_float(ptx::ld_shared_4(at + 32 * r));
  }

  /// What few batches need before scores are scaled. Rows with a negative scale: scores are negated. With a scale of 0
  /// or NaN: scores are scaled here.
  __device__ __forceinline__ void prepare_scores(bool general, int32_t first_row, int32_t column,
                                                 float (&s)[RowTiles][kColumns][4]) const {
    RowState<RowTiles> state;
#pragma unroll
    for (int32_t r = 0; r < 2 * RowTiles; ++r)
      state.logit_scale[r / 2][r % 2] = storage_.logit_scale[first_row + 8 * r];
    if (general) {
      scores_to_biased_logits(params_, context_, storage_, state, first_row, column, s);
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

  /// S = Q K^T. Fragments are loaded one step ahead of the MMAs.
  __device__ __forceinline__ void gemm0(uint32_t keys, float (&s)[RowTiles][kColumns][4]) const {
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
    const uint32_t q = opaque(q_ + swizzled_offset(DimQk, thread / 32 * RowTiles * 16 + lane % 16, lane / 16));
    const uint32_t k = opaque(keys + swizzled_offset(DimQk, lane % 8 + lane / 16 * 8, lane / 8 % 2));
    uint32_t a[2][RowTiles][4];
    uint32_t b[2][4];
    load_query_fragment(q, 0, a[0]);
    ptx::ldmatrix_x4(b[0], k);
#pragma unroll
    for (int32_t i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int32_t n = 0; n < kColumns / 2; ++n) {
        const int32_t next = i * (kColumns / 2) + n + 1;  // loaded ahead of the MMAs
        if (next < kSteps * (kColumns / 2)) {
          ptx::ldmatrix_x4(b[next % 2], advance_swizzled(k, 2 * key_step(next / (kColumns / 2))) +
                                            2 * 16 * (next % (kColumns / 2)) * DimQk);
        }
        if (n == kColumns / 2 - 1 && i + 1 < kSteps) load_query_fragment(q, i + 1, a[(i + 1) % 2]);
        const uint32_t(&key_fragment)[4] = b[(next - 1) % 2];
#pragma unroll
        for (int32_t m = 0; m < RowTiles; ++m) {
          ptx::mma_m16n8k16<T>(s[m][2 * n], a[i % 2][m], key_fragment[0], key_fragment[1]);
          ptx::mma_m16n8k16<T>(s[m][2 * n + 1], a[i % 2][m], key_fragment[2], key_fragment[3]);
        }
      }
    }
  }

  /// Order of the k-steps of GEMM0: neighbours in it differ by an addition to the address, so that few addresses are
  /// live.
  static constexpr int32_t kSteps = DimQk / 16;
  __device__ __forceinline__ static constexpr int32_t key_step(int32_t i) {
    return i % (kSteps / 4) * 4 + i / (kSteps / 4);
  }
  __device__ __forceinline__ static void load_query_fragment(uint32_t q, int32_t i, uint32_t (&a)[RowTiles][4]) {
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
      ptx::ldmatrix_x4(a[m], advance_swizzled(q, 2 * key_step(i)) + 2 * 16 * m * DimQk);
    }
  }

  /// P is computed during GEMM1: the p of the next 16 tokens among the MMAs of these 16. A k-step has so many pairs of
  /// p for each lane.
  static constexpr int32_t kPairs = RowTiles * 4;
  __device__ __forceinline__ void exponentiate(int32_t step, int32_t pair, const float (&scale)[RowTiles][2],
                                               const float (&s)[RowTiles][kColumns][4], uint32_t (&p)[RowTiles][4]) {
    const int32_t m = pair / 4;
    const int32_t column = pair / 2 % 2;
    const int32_t h = pair % 2;
    p[m][pair % 4] =
        exponentiate_pair<T>(state_, scale, m, h, s[m][2 * step + column][2 * h], s[m][2 * step + column][2 * h + 1]);
  }

  /// O += P V, with the p of the next k-step, and the addresses and page ids of later KV tiles, computed among the
  /// MMAs.
  __device__ __forceinline__ void gemm1(uint32_t values, int32_t first, const float (&scale)[RowTiles][2],
                                        const float (&s)[RowTiles][kColumns][4]) {
    constexpr int32_t kParts = DimV / 16;
    constexpr int32_t kValueSteps = kColumns / 2;
    const int32_t lane = lane_and_warp() % 32;
    const uint32_t v = opaque(values + swizzled_offset(DimV, lane % 16, lane / 16));
    AddressTerms facts;
    uint32_t b[2][4];
    uint32_t p[2][RowTiles][4];
    ptx::ldmatrix_x4_trans(b[0], v);
#pragma unroll
    for (int32_t pair = 0; pair < kPairs; ++pair) exponentiate(0, pair, scale, s, p[0]);
#pragma unroll
    for (int32_t step = 0; step < kValueSteps; ++step) {
#pragma unroll
      for (int32_t n = 0; n < kParts; ++n) {
        const int32_t next = step * kParts + n + 1;
        if (next < kValueSteps * kParts) {
          ptx::ldmatrix_x4_trans(b[next % 2],
                                 advance_swizzled(v, 2 * (next % kParts)) + 2 * 16 * (next / kParts) * DimV);
        }
        const uint32_t(&value_fragment)[4] = b[(next - 1) % 2];
#pragma unroll
        for (int32_t m = 0; m < RowTiles; ++m) {
          ptx::mma_m16n8k16<T>(acc_[m][2 * n], p[step % 2][m], value_fragment[0], value_fragment[1]);
          ptx::mma_m16n8k16<T>(acc_[m][2 * n + 1], p[step % 2][m], value_fragment[2], value_fragment[3]);
        }
        if (step + 1 < kValueSteps) {
#pragma unroll
          for (int32_t pair = n * kPairs / kParts; pair < (n + 1) * kPairs / kParts; ++pair) {
            exponentiate(step + 1, pair, scale, s, p[(step + 1) % 2]);
          }
        }
        if (step == kValueSteps - 1 && n == 0) facts = load_address_terms(first + 2 * kTile);
        if (step == kValueSteps - 1 && n == 2) store_addresses(first + 2 * kTile, facts);
        if (step == kValueSteps - 1 && n == 3) prefetch_page_id(first + 3 * kTile, facts.common);
      }
    }
  }

  /// Keeps NaN and Inf of V out of GEMM1: see nonfinite.cuh.
  __device__ __forceinline__ void isolate_nonfinite(uint32_t values, int32_t first) {
    if (__syncthreads_or(scan_nonfinite<T, DimV>(values, kTile, thread_, kThreads, false)) == 0) return;
    add_nonfinite<T, DimV>(params_, storage_, values, first, kTile, first_row_of(lane_and_warp()), acc_);
    __syncthreads();
    scan_nonfinite<T, DimV>(values, kTile, thread_, kThreads, true);
    __syncthreads();
  }

  static constexpr uint32_t kAllLanes = 0xffffffffu;

  RowState<RowTiles> state_;
  bool negate_scores_;  ///< prepare_scores is needed: a row of the warp has a scale that is not positive
  float acc_[RowTiles][DimV / 8][4];
};

}  // namespace folio::inline v0::kernels::cuda::sm80
