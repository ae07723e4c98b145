#pragma once

#include "kernels/cuda/sm90/common/epilogue.cuh"
#include "kernels/cuda/sm90/decode/softmax.cuh"
#include "ptx/barrier.cuh"

/// The epilogue of a work tile: the cross-warp reduction of softmax states and O, kReduceRows at a time. Then one warp
/// per row folds the result into its output tile's and writes it.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// A lane's components of an O row: runs of kRun neighbours, 32 * kRun apart. The last run may lie beyond the row.
template <int32_t DimV>
struct LaneComponents {
  static constexpr int32_t kRun = run_components(DimV);
  static constexpr int32_t kCount = lane_components(DimV);
  float x[kCount];
};

/// A row's state between the work tiles of one output tile: row_max, row_sum and O. It stays in shared memory: the
/// first touch of local memory takes 2 microseconds. The same lanes of the same warp store and read it, in epilogues
/// only.
template <int32_t DimV>
class RunningRow {
  using Components = LaneComponents<DimV>;

 public:
  /// `running`: [kMaxRows][running_floats].
  __device__ __forceinline__ RunningRow(float* running, int32_t row, int32_t lane)
      : state_(running + row * running_floats(DimV)), mine_(state_ + 4 + Components::kRun * lane), lane_(lane) {}

  __device__ __forceinline__ float row_max() const { return state_[0]; }
  __device__ __forceinline__ float row_sum() const { return state_[1]; }
  __device__ __forceinline__ float value(int32_t i) const { return mine_[offset(i)]; }

  __device__ __forceinline__ void store(float row_max, float row_sum, const Components& values) const {
    __syncwarp();  // all lanes have read the state before
    if (lane_ == 0) {
      state_[0] = row_max;
      state_[1] = row_sum;
    }
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; ++i) mine_[offset(i)] = values.x[i];
  }

 private:
  __device__ __forceinline__ static int32_t offset(int32_t i) {
    return i / Components::kRun * 32 * Components::kRun + i % Components::kRun;
  }

  float* const state_;
  float* const mine_;
  const int32_t lane_;
};

/// One vector load of neighbouring floats from aligned shared memory.
template <int32_t Count>
__device__ __forceinline__ void read_run(float* to, const float* from) {
  static_assert(Count == 2 || Count == 4);
  if constexpr (Count == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  } else {
    const float2 two = *reinterpret_cast<const float2*>(from);
    to[0] = two.x;
    to[1] = two.y;
  }
}

/// When the memory of the cross-warp reduction may be written again. Warps do not wait for each other's outputs: a
/// thread arrives once it has read, and waits when it comes to write.
template <typename Storage>
class ReductionBuffer {
 public:
  __device__ __forceinline__ explicit ReductionBuffer(Storage& storage)
      : empty_(ptx::shared_address(&storage.reduce_empty)) {}
  __device__ __forceinline__ void wait_for_readers() const {
    if (begun_) ptx::mbarrier_wait(empty_, parity_);
  }
  /// This thread has read all that it reads of one reduction.
  __device__ __forceinline__ void release() {
    ptx::mbarrier_arrive(empty_);
    parity_ = begun_ ? parity_ ^ 1 : 0;
    begun_ = true;
  }

 private:
  const uint32_t empty_;
  uint32_t parity_ = 0;
  bool begun_ = false;
};

/// Reduces row `row` of the work tile over the consumer warps and writes it. By one warp. `release()` is called when
/// all has been read.
template <int32_t DimV, int32_t kReduceRows, typename Storage, typename Release>
__device__ __forceinline__ void reduce_and_write_row(const AttentionParams& params, const Storage& storage,
                                                     const WorkTileContext& context, const float* reduce, int32_t row,
                                                     int32_t lane, float* running, const Release& release) {
  using Components = LaneComponents<DimV>;
  constexpr int32_t kStride = reduce_stride({DimV, DimV});
  const scheduler::WorkTile& tile = context.work_tile;
  const int32_t place = row % kReduceRows;
  // Every lane reads all warps' row_max and row_sum, and no load waits for another. The O of an empty state is zero.
  constexpr int32_t kWarps = Storage::kWarps;
  float warp_max[kWarps];
  float warp_sum[kWarps];
#pragma unroll
  for (int32_t w = 0; w < kWarps; w += 4) {
    read_run<4>(warp_max + w, storage.row_max[place] + w);
    read_run<4>(warp_sum + w, storage.row_sum[place] + w);
  }
  Components warp_o[kWarps];
#pragma unroll
  for (int32_t w = 0; w < kWarps; ++w) {
    const float* const from = reduce + (w * kReduceRows + place) * kStride + Components::kRun * lane;
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; i += Components::kRun) {
      const int32_t d = i / Components::kRun * 32 * Components::kRun;
      if (DimV % (32 * Components::kRun) != 0 && d + Components::kRun * lane >= DimV) continue;
      read_run<Components::kRun>(warp_o[w].x + i, from + d);
    }
  }
  release();
  float row_max = warp_max[0];
#pragma unroll
  for (int32_t w = 1; w < kWarps; ++w) row_max = fmaxf(row_max, warp_max[w]);
  float row_sum = 0.0f;
  Components o{};
#pragma unroll
  for (int32_t w = 0; w < kWarps; ++w) {
    const float rescale = warp_max[w] == row_max ? 1.0f : ptx::ex2_approx(warp_max[w] - row_max);
    const float factor = is_empty(warp_max[w], warp_sum[w]) ? 0.0f : rescale;
    row_sum = __fmaf_rn(warp_sum[w], factor, row_sum);
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; ++i) o.x[i] = __fmaf_rn(warp_o[w].x[i], factor, o.x[i]);
  }
#pragma unroll
  for (float& x : o.x) x = __fmul_rn(x, context.v_scale[row]);
  const RunningRow<DimV> before(running, row, lane);
  if ((tile.flags & scheduler::kStart) == 0) {
    const Fold factors = fold_factors(before.row_max(), before.row_sum(), row_max, row_sum);
    row_sum = fold(factors, before.row_sum(), row_sum);
    row_max = factors.max;
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; ++i) o.x[i] = fold(factors, before.value(i), o.x[i]);
  }
  if ((tile.flags & scheduler::kFinish) == 0) return before.store(row_max, row_sum, o);
  const auto for_pairs = [&](const auto& write) {
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; i += 2) {
      const int32_t d = Components::kRun * lane + i / Components::kRun * 32 * Components::kRun + i % Components::kRun;
      if (d < DimV) write(d, o.x[i], o.x[i + 1]);
    }
  };
  if (tile.partial >= 0) {
    const int32_t partial = tile.partial + row;
    if (lane == 0) {
      params.partial_row_max[partial] = row_max;
      params.partial_row_sum[partial] = row_sum;
    }
    float* const to = params.partial_acc + int64_t{partial} * params.head_dim_v;
    for_pairs([&](int32_t d, float x, float y) { *reinterpret_cast<float2*>(to + d) = float2{x, y}; });
    return;
  }
  const QueryRow q_row = query_row(params, tile, row);
  const RowEnd end = end_row(params, q_row.q_head, row_max, row_sum);
  if (lane == 0) write_lse(params, q_row.token, q_row.q_head, end);
  const int64_t at = q_row.token * params.out_token_stride + q_row.q_head * params.out_head_stride;
  for_pairs([&](int32_t d, float x, float y) {
    write_pair(params, at + d, end.empty ? 0.0f : x * end.factor + 0.0f, end.empty ? 0.0f : y * end.factor + 0.0f);
  });
}

/// By all consumer warps. Each writes its state and `o` of kReduceRows rows to shared memory; then each reduces every
/// kWarps-th of these rows. `reduce`: [kWarps][kReduceRows][reduce_stride]; `running`: see RunningRow.
template <int32_t DimV, Fp8 kFp8, int32_t Columns, int32_t kReduceRows, typename Storage>
__device__ __forceinline__ void epilogue(const AttentionParams& params, Storage& storage,
                                         ReductionBuffer<Storage>& reduction, const WorkTileContext& context,
                                         const SoftmaxState<Columns>& state, const float (&o)[DimV / 16][Columns][4],
                                         float* reduce, float* running, int32_t warp, int32_t lane) {
  constexpr int32_t kStride = reduce_stride({DimV, DimV});
  constexpr int32_t kWarps = Storage::kWarps;
#pragma unroll 1
  for (int32_t first = 0; first < 8 * Columns; first += kReduceRows) {
    if (first > 0) {
      if (first >= context.num_rows) break;
      reduction.wait_for_readers();
    }
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
      if (8 * n / kReduceRows * kReduceRows != first) continue;
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        const int32_t row = 8 * n % kReduceRows + lane % 4 * 2 + j;
        float row_sum = state.row_sum[n][j];
#pragma unroll
        for (int32_t step = 4; step < 32; step *= 2) {
          row_sum = __fadd_rn(row_sum, __shfl_xor_sync(kAllLanes, row_sum, step));
        }
        if (lane < 4) {
          storage.row_max[row][warp] = state.row_max[n][j];
          storage.row_sum[row][warp] = row_sum;
        }
        float* const to = reduce + (warp * kReduceRows + row) * kStride + first_component<kFp8>(lane);
#pragma unroll
        for (int32_t m = 0; m < DimV / 16; ++m) {
          to[16 * m] = o[m][n][j];
          to[16 * m + kSecondComponent<kFp8>] = o[m][n][2 + j];
        }
      }
    }
    ptx::named_barrier_sync(kConsumerBarrier, 32 * kWarps);
    const int32_t end = min(context.num_rows, first + kReduceRows);
    if (first + warp >= end) reduction.release();
#pragma unroll 1
    for (int32_t row = first + warp; row < end; row += kWarps) {
      reduce_and_write_row<DimV, kReduceRows>(params, storage, context, reduce, row, lane, running,
                                              [&reduction, row, end] {
                                                if (row + kWarps >= end) reduction.release();
                                              });
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
