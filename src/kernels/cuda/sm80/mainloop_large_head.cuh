#pragma once

#include "kernels/cuda/sm80/epilogue.cuh"
#include "kernels/cuda/sm80/nonfinite.cuh"
#include "kernels/cuda/sm80/producer.cuh"

/// Head dimensions above 256, foremost MLA's 576/512, where V lies inside K. All warps share the rows and KV tiles of
/// 16 tokens. GEMM0: a warp computes 16 rows x 8 tokens of S; the warps exchange S through shared memory, and each
/// repeats the softmax of all rows. GEMM1: a warp has a quarter of the components of O. Where V is the first part of K,
/// a KV tile is copied once and three stages are in flight; else K and V of one tile are copied and awaited.
namespace folio::inline v0::kernels::cuda::sm80 {

template <typename T, int32_t Rows>
class LargeHeadMainloop {
  static constexpr int32_t kQk = kLargeHeadDims.qk;
  static constexpr int32_t kRowTiles = Rows / 16;
  static constexpr int32_t kColumns = kLargeHeadKvTile / 8;        ///< column tiles of S
  static constexpr int32_t kMine = kLargeHeadDims.v / 8 / kWarps;  ///< column tiles of O
  static constexpr int32_t kTileBytes = 2 * kLargeHeadKvTile * kQk;
  static_assert(kRowTiles * kColumns == kWarps);

 public:
  __device__ __forceinline__ LargeHeadMainloop(const AttentionParams& params, const WorkTileContext& context,
                                               SharedStorage<Rows>& storage, uint32_t shared, float* scores)
      : params_(params),
        context_(context),
        storage_(storage),
        q_(shared),
        pipeline_(shared + 2 * Rows * kQk),
        scores_(scores),
        thread_(thread_index()),
        lane_(thread_ % 32),
        warp_(thread_ / 32) {}

  /// Computes one work tile. The copy of Q has been committed. Leaves O and the row states in `results` and
  /// storage.result.
  __device__ __forceinline__ void run(float* results) {
#pragma unroll
    for (int32_t m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < kMine; ++n) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) acc_[m][n][i] = 0.0f;
      }
    }
    init_row_state<false>(params_, context_, storage_, lane_ / 4, state_);
    if (context_.num_tiles > 0) mainloop();
    ptx::cp_async_wait<0>();
    quad_reduce_row_sum(state_);
    __syncthreads();  // the tiles become the place of results
    store_acc_to_smem<kLargeHeadDims.v>(state_, acc_, lane_ / 4, warp_ * kMine * 8 + 2 * (lane_ % 4), results,
                                        storage_);
  }

 private:
  __device__ __forceinline__ void mainloop() {
    const SegmentParams& segment = *context_.segment;
    const int64_t head = context_.work_tile.kv_head;
    const bool inside = segment.k == segment.v && segment.k_strides.page == segment.v_strides.page &&
                        segment.k_strides.token == segment.v_strides.token &&
                        head * segment.k_strides.head == head * segment.v_strides.head;
    const bool general = context_.custom || has_bias(params_);
    const int32_t begin = context_.visible_range.any_begin / kLargeHeadKvTile;
    const int32_t end = (context_.visible_range.any_end + kLargeHeadKvTile - 1) / kLargeHeadKvTile;
    if (begin >= end) return;
    if (inside) prologue(begin, end);
    for (int32_t tile = begin; tile < end; ++tile) {
      const int32_t first = tile * kLargeHeadKvTile;
      uint32_t keys = pipeline_;
      uint32_t values = pipeline_ + kTileBytes;
      if (inside) {
        keys = values = pipeline_ + (tile - begin) % kLargeHeadStages * kTileBytes;
        advance_pipeline(begin, tile, end);
      } else {
        load_unpipelined(tile);
      }
      gemm0(keys);
      __syncthreads();  // the scores of all warps are there
      float s[kRowTiles][kColumns][4];
      load_scores(s);
      const bool masked = needs_mask(context_.visible_range, first, kLargeHeadKvTile);
      scores_to_logits(params_, context_, storage_, state_, lane_ / 4, first + 2 * (lane_ % 4), general, masked, true,
                       s);
      float factor[kRowTiles][2];
      if (online_softmax<T>(state_, true, s, factor)) rescale(acc_, factor);
      if (context_.custom || (masked && is_mixed(context_.visible_range, first, kLargeHeadKvTile)))
        isolate_nonfinite(values, first);
      gemm1(values, s);
    }
  }

  __device__ __forceinline__ void look_up(int32_t stage, int32_t tile) {
    if (thread_ < kLargeHeadKvTile) {
      storage_.offsets[stage][thread_] = offsets_of(context_, place_of(context_, tile * kLargeHeadKvTile + thread_));
    }
  }

  /// Copies K of a KV tile whose tokens were looked up; zeros for tokens that no row sees.
  __device__ __forceinline__ void copy_keys(int32_t stage, int32_t tile, uint32_t to) const {
    const SegmentParams& segment = *context_.segment;
    const ChunkSource k{segment.k, segment.dtype, segment.wide};
    copy_tile<T, kQk, kLargeHeadKvTile>(to, storage_.offsets[stage], &TokenOffsets::k, k, params_.head_dim_qk,
                                        is_whole(k, tile), thread_);
  }
  __device__ __forceinline__ bool is_whole(const ChunkSource& source, int32_t tile) const {
    const int32_t first = tile * kLargeHeadKvTile;
    return source.direct() && first >= context_.visible_range.any_begin &&
           first + kLargeHeadKvTile <= context_.visible_range.any_end;
  }

  __device__ __forceinline__ void prologue(int32_t begin, int32_t end) {
#pragma unroll 1
    for (int32_t i = 0; i < kLargeHeadStages - 1; ++i) {
      look_up(i & 1, begin + i);
      __syncthreads();
      if (begin + i < end) copy_keys(i & 1, begin + i, pipeline_ + i * kTileBytes);
      ptx::cp_async_commit();
    }
    look_up((kLargeHeadStages - 1) & 1, begin + kLargeHeadStages - 1);
  }

  /// Waits for the KV tile, issues the copy of the one that takes the stage of its predecessor, looks up the one after.
  __device__ __forceinline__ void advance_pipeline(int32_t begin, int32_t tile, int32_t end) {
    const int32_t ahead = tile - begin + kLargeHeadStages - 1;
    ptx::cp_async_wait<kLargeHeadStages - 2>();
    __syncthreads();  // this tile has arrived, the one before is consumed, the one ahead is looked up
    if (begin + ahead < end) copy_keys(ahead & 1, begin + ahead, pipeline_ + ahead % kLargeHeadStages * kTileBytes);
    ptx::cp_async_commit();
    look_up((ahead + 1) & 1, begin + ahead + 1);
  }

  __device__ __forceinline__ void load_unpipelined(int32_t tile) {
    look_up(0, tile);
    __syncthreads();  // the tile before is consumed
    copy_keys(0, tile, pipeline_);
    const SegmentParams& segment = *context_.segment;
    const ChunkSource v{segment.v, segment.dtype, segment.wide};
    copy_tile<T, kLargeHeadDims.v, kLargeHeadKvTile, kQk>(pipeline_ + kTileBytes, storage_.offsets[0], &TokenOffsets::v,
                                                          v, params_.head_dim_v, is_whole(v, tile), thread_);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  /// This warp's part of S = Q K^T, to shared memory. Four accumulators make the chain of MMAs a quarter as long.
  __device__ __forceinline__ void gemm0(uint32_t keys) const {
    constexpr int32_t kSteps = kQk / 16;
    static_assert(kSteps % 4 == 0);
    const int32_t m = warp_ / kColumns;
    const int32_t n = warp_ % kColumns;
    const uint32_t q = opaque(q_ + swizzled_offset(kQk, m * 16 + lane_ % 16, lane_ / 16));
    const uint32_t k = opaque(keys + swizzled_offset(kQk, n * 8 + lane_ % 8, lane_ / 8));
    float s[4][4] = {};
#pragma unroll
    for (int32_t step = 0; step < kSteps; step += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, advance_swizzled(k, 2 * step));
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, advance_swizzled(q, 2 * (step + i)));
        ptx::mma_m16n8k16<T>(s[(step + i) % 4], a, b[2 * i], b[2 * i + 1]);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      s[0][i] = __fadd_rn(__fadd_rn(s[0][i], s[1][i]), __fadd_rn(s[2][i], s[3][i]));
    }
    float* const to = scores_ + (m * 16 + lane_ / 4) * kLargeHeadScoreStride + n * 8 + 2 * (lane_ % 4);
    *reinterpret_cast<float2*>(to) = float2{s[0][0], s[0][1]};
    *reinterpret_cast<float2*>(to + 8 * kLargeHeadScoreStride) = float2{s[0][2], s[0][3]};
  }

  __device__ __forceinline__ void load_scores(float (&s)[kRowTiles][kColumns][4]) const {
    const float* const from = scores_ + lane_ / 4 * kLargeHeadScoreStride + 2 * (lane_ % 4);
#pragma unroll
    for (int32_t m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int32_t h = 0; h < 2; ++h) {
          const float2 two = *reinterpret_cast<const float2*>(from + (16 * m + 8 * h) * kLargeHeadScoreStride + 8 * n);
          s[m][n][2 * h] = two.x;
          s[m][n][2 * h + 1] = two.y;
        }
      }
    }
  }

  /// O += P V for this warp's components.
  __device__ __forceinline__ void gemm1(uint32_t values, const float (&s)[kRowTiles][kColumns][4]) {
    const uint32_t v = opaque(values + swizzled_offset(kQk, lane_ % 16, lane_ / 16));
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int32_t m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) a[m][i] = ptx::pack_two<T>(s[m][i / 2][i % 2 * 2], s[m][i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int32_t n = 0; n < kMine / 2; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, advance_swizzled(v + static_cast<uint32_t>(warp_ * kMine * 16), 2 * n));
#pragma unroll
      for (int32_t m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16<T>(acc_[m][2 * n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc_[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }

  /// Scans whole rows of the KV tile: where V lies inside K, K has been consumed.
  __device__ __forceinline__ void isolate_nonfinite(uint32_t values, int32_t first) {
    if (__syncthreads_or(scan_nonfinite<T, kQk>(values, kLargeHeadKvTile, thread_, kThreads, false)) == 0) return;
    add_nonfinite<T, kQk>(params_, storage_, values, first, kLargeHeadKvTile, lane_ / 4, acc_, warp_ * kMine);
    __syncthreads();
    scan_nonfinite<T, kQk>(values, kLargeHeadKvTile, thread_, kThreads, true);
    __syncthreads();
  }

  const AttentionParams& params_;
  const WorkTileContext& context_;
  SharedStorage<Rows>& storage_;
  const uint32_t q_;
  const uint32_t pipeline_;
  float* const scores_;
  const int32_t thread_;
  const int32_t lane_;
  const int32_t warp_;
  RowState<kRowTiles> state_;
  float acc_[kRowTiles][kMine][4];
};

}  // namespace folio::inline v0::kernels::cuda::sm80
