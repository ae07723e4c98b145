#pragma once

#include "kernels/cuda/sm90/decode/epilogue.cuh"
#include "kernels/cuda/sm90/decode/kv_pipeline.cuh"
#include "kernels/cuda/sm90/decode/mask.cuh"
#include "kernels/cuda/sm90/decode/mma.cuh"
#include "kernels/cuda/sm90/decode/softmax.cuh"

namespace folio::inline v0::kernels::cuda::sm90::decode {

/// A consumer warp. It iterates over its KV tiles of every tile batch with a softmax state and an O of its own. The
/// epilogue of a work tile reduces these across the warps.
template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
class ConsumerWarp {
  static constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8), kRows};
  static constexpr SmemLayout kLayout = smem_layout(kDims);
  static constexpr int32_t kWarps = consumer_warps(kDims);
  static constexpr int32_t kColumns = kRows / 8;  ///< column tiles of the MMA
  using Storage = SharedStorage<kWarps, stages(kDims)>;
  using Mma = TileMma<T, DimQk, DimV, kFp8, kColumns>;

 public:
  __device__ __forceinline__ ConsumerWarp(const DecodeParams& params, unsigned char* smem, Storage& storage)
      : params_(params.attention),
        storage_(storage),
        reduce_(reinterpret_cast<float*>(smem + kLayout.reduce)),
        running_(reinterpret_cast<float*>(smem + kLayout.running)),
        queries_(ptx::shared_address(smem + kLayout.queries)),
        batch_full_(ptx::shared_address(storage.batch_full)),
        batch_empty_(ptx::shared_address(storage.batch_empty)),
        reduction_(storage),
        warp_(__shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        mma_(lane_),
        pipeline_(params, smem, storage, warp_, lane_) {}

  __device__ __forceinline__ void run() {
    pipeline_.produce_first_tiles();
#pragma unroll 1
    for (;;) {
      const TileBatch& batch = consumer_wait();
      if ((batch.flags & kNoMoreWork) != 0) return;
      compute_work_tile(batch.context);
    }
  }

 private:
  /// Waits for the next tile batch.
  __device__ __forceinline__ const TileBatch& consumer_wait() const {
    const int32_t stage = num_batches_ % kBatchStages;
    ptx::mbarrier_wait(batch_full_ + 8 * stage, num_batches_ / kBatchStages & 1);
    return storage_.batches[stage];
  }
  /// Releases the tile batch and, with a work tile's last one, its context.
  __device__ __forceinline__ void consumer_release() {
    pipeline_.finish_batch(num_batches_);
    ptx::mbarrier_arrive(batch_empty_ + 8 * (num_batches_ % kBatchStages));
    ++num_batches_;
  }

  /// Mainloop and epilogue of a work tile whose first batch is committed.
  __device__ __forceinline__ void compute_work_tile(int32_t index) {
    const WorkTileContext& context = storage_.contexts[index];
    reduction_.wait_for_readers();  // scratch() lies in its memory
    const uint32_t queries = queries_ + static_cast<uint32_t>(index * kMaxRows * query_stride(kDims));
    typename Mma::Queries q;
    mma_.load_queries(queries, q);
    SoftmaxState<kColumns> state;
    float o[DimV / 16][kColumns][4];
#pragma unroll
    for (int32_t n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        state.row_max[n][j] = -INFINITY;
        state.row_sum[n][j] = 0.0f;
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
    const int32_t copy_tokens = context.copy_tokens;
    const typename Mma::Addresses addresses = mma_.addresses(copy_tokens);
    const TileBatch* batch = &storage_.batches[num_batches_ % kBatchStages];
    int32_t left = batch->num_tiles - warp_;
    int32_t next = batch->first + warp_ * kTileTokens;
#pragma unroll 1
    for (;;) {
      pipeline_.produce();
      if (left <= 0) {
        if ((batch->flags & kLastBatch) != 0) break;
        consumer_release();
        batch = &consumer_wait();
        left = batch->num_tiles - warp_;
        next = batch->first + warp_ * kTileTokens;
        continue;
      }
      const VisibleRange visible = context.visible;  // read again for each tile: registers are scarce
      if constexpr (kFp8 != Fp8::kNone) {
        const int32_t unmasked = general || copy_tokens != kTmaWholeTile ? 0 : count_unmasked(visible, next);
        const int32_t run = min(min((left + kWarps - 1) / kWarps, unmasked), pipeline_.refills());
        if (run > 0) {
          compute_unmasked(run, addresses, queries, q, state, o);
          left -= run * kWarps;
          next += run * kWarps * kTileTokens;
          continue;
        }
      }
      const int32_t first = next;
      left -= kWarps;
      next += kWarps * kTileTokens;
      const uint32_t keys = pipeline_.consumer_wait();
      const uint32_t values = keys + tile_bytes(DimQk, kDims.bytes);
      float s[kColumns][4];
      mma_.gemm0(keys + addresses.key, addresses, queries, q, s);
      if (general) {
        to_general_logits<kColumns>(params_, context, first, lane_, scratch(), s);
      } else {
        scale_scores<kColumns>(state, s);
      }
      const bool masked = needs_mask(visible, first, kTileTokens);
      if (masked) mask_logits<kColumns>(context, first, lane_, s);
      online_softmax<T>(state, s, o);
      bool written = copy_tokens == kCpAsync;
      if (masked || custom) {  // otherwise every row sees every token of the tile
        const bool invisible = has_invisible(visible, first, kTileTokens);
        const bool mixed = custom || is_mixed(visible, first, kTileTokens);
        written = written || invisible || mixed;
        const ValueTile<T, DimV, kFp8> value_tile{values, copy_tokens, lane_};
        if (invisible) value_tile.zero_invisible(visible.any_begin - first, visible.any_end - first);
        if (mixed && value_tile.scan_nonfinite()) {
          value_tile.template add_nonfinite<kColumns>(params_, context, first, scratch(), o);
          value_tile.zero_nonfinite();
        }
      }
      mma_.gemm1(values + addresses.value, addresses, s, o);
      pipeline_.consumer_release(written);
    }
    epilogue<DimV, kFp8, kColumns, reduce_rows(kDims)>(params_, storage_, reduction_, context, state, o, reduce_,
                                                       running_, warp_, lane_);
    consumer_release();
  }

  /// How many KV tiles of this warp, from token `first` on, all rows see whole.
  __device__ __forceinline__ static int32_t count_unmasked(const VisibleRange& visible, int32_t first) {
    const int32_t tokens = visible.all_end - first - kTileTokens;
    return first < visible.all_begin || tokens < 0 ? 0 : tokens / (kWarps * kTileTokens) + 1;
  }

  /// The mainloop for `count` KV tiles without masks or biases, whose stages TMA refills. With fp8 data a warp's
  /// instructions are the limit, and half of those above are branches and what they wait for. With 16-bit data they are
  /// not, and short batches would pay for more code.
  __device__ __forceinline__ void compute_unmasked(int32_t count, const typename Mma::Addresses& addresses,
                                                   uint32_t queries, const typename Mma::Queries& q,
                                                   SoftmaxState<kColumns>& state, float (&o)[DimV / 16][kColumns][4]) {
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t keys = pipeline_.consumer_wait();
      float s[kColumns][4];
      mma_.gemm0(keys + addresses.key, addresses, queries, q, s);
      scale_scores<kColumns>(state, s);
      online_softmax<T>(state, s, o);
      mma_.gemm1(keys + tile_bytes(DimQk, kDims.bytes) + addresses.value, addresses, s, o);
      pipeline_.refill();
    }
    pipeline_.finish_refills(count);
  }

  /// The lane's floats, 32 apart, in the part of `reduce` that the warp writes in the epilogue.
  __device__ __forceinline__ float* scratch() const {
    constexpr int32_t kFloats = reduce_rows(kDims) * reduce_stride(kDims);  // of a warp
    static_assert(32 * (DimV / 4) <= kFloats && 4 * kColumns <= DimV / 4);
    return reduce_ + warp_ * kFloats + lane_;
  }

  const AttentionParams& params_;
  Storage& storage_;
  float* const reduce_;   ///< see epilogue
  float* const running_;  ///< see RunningRow
  const uint32_t queries_;
  const uint32_t batch_full_;
  const uint32_t batch_empty_;
  ReductionBuffer<Storage> reduction_;
  const int32_t warp_;
  const int32_t lane_;
  const Mma mma_;
  KvPipeline<T, DimQk, DimV, kFp8, kRows> pipeline_;
  int32_t num_batches_ = 0;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
