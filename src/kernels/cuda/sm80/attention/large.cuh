#pragma once

#include "kernels/cuda/sm80/attention/merge_last.cuh"
#include "kernels/cuda/sm80/attention/wide.cuh"

/// Head dimensions above 256, as of values that lie inside keys (576/512: latent attention). All warps share the rows
/// and tiles of 16 tokens; a warp has an eighth of a tile's scores (16 rows, 8 tokens), gets the others through shared
/// memory, repeats the softmax for itself, and has a quarter of the values' components. Where values are their keys'
/// first components, they are copied once and three tiles are under way; else both are copied, and waited for.
namespace folio::inline v0::kernels::cuda::sm80 {

template <typename T, int32_t Rows>
class LargeWay {
  static constexpr int32_t kQk = kLargeDims.qk;
  static constexpr int32_t kRowTiles = Rows / 16;
  static constexpr int32_t kColumns = kLargeTokens / 8;        ///< of scores, in tiles of 8
  static constexpr int32_t kMine = kLargeDims.v / 8 / kWarps;  ///< of values
  static constexpr int32_t kTileBytes = 2 * kLargeTokens * kQk;
  static_assert(kRowTiles * kColumns == kWarps);

 public:
  __device__ __forceinline__ LargeWay(const AttentionParams& params, const ItemContext& context, RowInfo<Rows>& rows,
                                      uint32_t shared, float* scores)
      : params_(params),
        context_(context),
        rows_(rows),
        q_(shared),
        ring_(shared + 2 * Rows * kQk),
        scores_(scores),
        thread_(thread_number()),
        lane_(thread_ % 32),
        warp_(thread_ / 32) {}

  /// One item. The queries' copy has been committed. Leaves the rows' states in `results` and rows.result.
  __device__ __forceinline__ void run(float* results) {
#pragma unroll
    for (int32_t m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < kMine; ++n) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) acc_[m][n][i] = 0.0f;
      }
    }
    begin_state<false>(params_, context_, rows_, lane_ / 4, state_);
    if (context_.num_tiles > 0) accumulate();
    ptx::cp_async_wait<0>();
    join_quad(state_);
    __syncthreads();  // the tiles become the place of results
    keep_results<kLargeDims.v>(state_, acc_, lane_ / 4, warp_ * kMine * 8 + 2 * (lane_ % 4), results, rows_);
  }

 private:
  __device__ __forceinline__ void accumulate() {
    const SegmentParams& segment = *context_.segment;
    const int64_t head = context_.item.kv_head;
    const bool inside = segment.k == segment.v && segment.k_strides.page == segment.v_strides.page &&
                        segment.k_strides.token == segment.v_strides.token &&
                        head * segment.k_strides.head == head * segment.v_strides.head;
    const bool general = context_.custom || has_bias(params_);
    const int32_t begin = context_.sight.any_begin / kLargeTokens;
    const int32_t end = (context_.sight.any_end + kLargeTokens - 1) / kLargeTokens;
    if (begin >= end) return;
    if (inside) begin_ring(begin, end);
    for (int32_t tile = begin; tile < end; ++tile) {
      const int32_t first = tile * kLargeTokens;
      uint32_t keys = ring_;
      uint32_t values = ring_ + kTileBytes;
      if (inside) {
        keys = values = ring_ + (tile - begin) % kLargeStages * kTileBytes;
        advance_ring(begin, tile, end);
      } else {
        copy_both(tile);
      }
      multiply_keys(keys);
      __syncthreads();  // the other warps' scores are there
      float s[kRowTiles][kColumns][4];
      collect_scores(s);
      const bool masked = needs_mask(context_.sight, first, kLargeTokens);
      to_logits(params_, context_, rows_, state_, lane_ / 4, first + 2 * (lane_ % 4), general, masked, true, s);
      float factor[kRowTiles][2];
      if (to_weights<T>(state_, true, s, factor)) rescale(acc_, factor);
      if (context_.custom || (masked && is_mixed(context_.sight, first, kLargeTokens)))
        set_special_apart(values, first);
      multiply_values(values, s);
    }
  }

  __device__ __forceinline__ void look_up(int32_t slot, int32_t tile) {
    if (thread_ < kLargeTokens) {
      rows_.offsets[slot][thread_] = offsets_of(context_, place_of(context_, tile * kLargeTokens + thread_));
    }
  }

  /// Keys of a tile that was looked up; of tokens that no row sees, zeros.
  __device__ __forceinline__ void copy_keys(int32_t slot, int32_t tile, uint32_t to) const {
    const SegmentParams& segment = *context_.segment;
    const PieceSource k{segment.k, segment.dtype, segment.wide};
    copy_tile<T, kQk, kLargeTokens>(to, rows_.offsets[slot], &TokenOffsets::k, k, params_.head_dim_qk,
                                    is_whole(k, tile), thread_);
  }
  __device__ __forceinline__ bool is_whole(const PieceSource& source, int32_t tile) const {
    const int32_t first = tile * kLargeTokens;
    return source.direct() && first >= context_.sight.any_begin && first + kLargeTokens <= context_.sight.any_end;
  }

  __device__ __forceinline__ void begin_ring(int32_t begin, int32_t end) {
#pragma unroll 1
    for (int32_t i = 0; i < kLargeStages - 1; ++i) {
      look_up(i & 1, begin + i);
      __syncthreads();
      if (begin + i < end) copy_keys(i & 1, begin + i, ring_ + i * kTileBytes);
      ptx::cp_async_commit();
    }
    look_up((kLargeStages - 1) & 1, begin + kLargeStages - 1);
  }

  /// Waits for the tile and begins the copy of one that takes the place of the tile before; looks up the one after.
  __device__ __forceinline__ void advance_ring(int32_t begin, int32_t tile, int32_t end) {
    const int32_t ahead = tile - begin + kLargeStages - 1;
    ptx::cp_async_wait<kLargeStages - 2>();
    __syncthreads();  // this tile is there, the one before was used, the one ahead was looked up
    if (begin + ahead < end) copy_keys(ahead & 1, begin + ahead, ring_ + ahead % kLargeStages * kTileBytes);
    ptx::cp_async_commit();
    look_up((ahead + 1) & 1, begin + ahead + 1);
  }

  __device__ __forceinline__ void copy_both(int32_t tile) {
    look_up(0, tile);
    __syncthreads();  // the tile before was used
    copy_keys(0, tile, ring_);
    const SegmentParams& segment = *context_.segment;
    const PieceSource v{segment.v, segment.dtype, segment.wide};
    copy_tile<T, kLargeDims.v, kLargeTokens, kQk>(ring_ + kTileBytes, rows_.offsets[0], &TokenOffsets::v, v,
                                                  params_.head_dim_v, is_whole(v, tile), thread_);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  /// This warp's products of 16 rows with 8 keys, to shared memory. Four sums: a quarter as long a chain.
  __device__ __forceinline__ void multiply_keys(uint32_t keys) const {
    constexpr int32_t kSteps = kQk / 16;
    static_assert(kSteps % 4 == 0);
    const int32_t m = warp_ / kColumns;
    const int32_t n = warp_ % kColumns;
    const uint32_t q = anew(q_ + piece_offset(kQk, m * 16 + lane_ % 16, lane_ / 16));
    const uint32_t k = anew(keys + piece_offset(kQk, n * 8 + lane_ % 8, lane_ / 8));
    float s[4][4] = {};
#pragma unroll
    for (int32_t step = 0; step < kSteps; step += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, advance(k, 2 * step));
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, advance(q, 2 * (step + i)));
        ptx::mma_m16n8k16<T>(s[(step + i) % 4], a, b[2 * i], b[2 * i + 1]);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      s[0][i] = __fadd_rn(__fadd_rn(s[0][i], s[1][i]), __fadd_rn(s[2][i], s[3][i]));
    }
    float* const to = scores_ + (m * 16 + lane_ / 4) * kLargeScoreStride + n * 8 + 2 * (lane_ % 4);
    *reinterpret_cast<float2*>(to) = float2{s[0][0], s[0][1]};
    *reinterpret_cast<float2*>(to + 8 * kLargeScoreStride) = float2{s[0][2], s[0][3]};
  }

  __device__ __forceinline__ void collect_scores(float (&s)[kRowTiles][kColumns][4]) const {
    const float* const from = scores_ + lane_ / 4 * kLargeScoreStride + 2 * (lane_ % 4);
#pragma unroll
    for (int32_t m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int32_t h = 0; h < 2; ++h) {
          const float2 two = *reinterpret_cast<const float2*>(from + (16 * m + 8 * h) * kLargeScoreStride + 8 * n);
          s[m][n][2 * h] = two.x;
          s[m][n][2 * h + 1] = two.y;
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(uint32_t values, const float (&s)[kRowTiles][kColumns][4]) {
    const uint32_t v = anew(values + piece_offset(kQk, lane_ % 16, lane_ / 16));
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int32_t m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) a[m][i] = ptx::pack_two<T>(s[m][i / 2][i % 2 * 2], s[m][i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int32_t n = 0; n < kMine / 2; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, advance(v + static_cast<uint32_t>(warp_ * kMine * 16), 2 * n));
#pragma unroll
      for (int32_t m = 0; m < kRowTiles; ++m) {
        ptx::mma_m16n8k16<T>(acc_[m][2 * n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc_[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }

  /// The tile's rows are searched whole: where values lie inside keys, these have been used.
  __device__ __forceinline__ void set_special_apart(uint32_t values, int32_t first) {
    if (__syncthreads_or(scan_special<T, kQk>(values, kLargeTokens, thread_, kThreads, false)) == 0) return;
    add_special<T, kQk>(params_, rows_, values, first, kLargeTokens, lane_ / 4, acc_, warp_ * kMine);
    __syncthreads();
    scan_special<T, kQk>(values, kLargeTokens, thread_, kThreads, true);
    __syncthreads();
  }

  const AttentionParams& params_;
  const ItemContext& context_;
  RowInfo<Rows>& rows_;
  const uint32_t q_;
  const uint32_t ring_;
  float* const scores_;
  const int32_t thread_;
  const int32_t lane_;
  const int32_t warp_;
  RowState<kRowTiles> state_;
  float acc_[kRowTiles][kMine][4];
};

/// A CTA's work list. All items go one way, in which a row's bits depend on tiles of 16 tokens at absolute
/// positions alone. `memory` is shared, kLargeBytes and a RowInfo, from a multiple of 128 on.
template <typename T>
__device__ __forceinline__ void run_large_block(const AttentionParams& params, unsigned char* memory) {
  static_assert(kLargeBytes + static_cast<int32_t>(sizeof(RowInfo<kLargeRows>)) <= kSharedLimit);
  static_assert(4 * kLargeRows * result_stride(kLargeDims) <= kLargeBytes);
  auto& rows = *reinterpret_cast<RowInfo<kLargeRows>*>(memory + kLargeBytes);
  const uint32_t shared = ptx::shared_address(memory);
  const scheduler::PlanView& plan = params.plan->view;
  RunningState<kLargeRows*(kLargeDims.v / 4) / kThreads> running;
  float* const results = reinterpret_cast<float*>(memory);
  float* const scores = reinterpret_cast<float*>(memory + kLargeScores);
  const int32_t end = plan.worker_indptr[blockIdx.x + 1];
  int32_t i = plan.worker_indptr[blockIdx.x];
  if (threadIdx.x == 0 && i < end) rows.next = plan.work_tiles[i];
  for (; i < end; ++i) {
    if (threadIdx.x == 0) begin_item(params, plan, rows.next, rows.context);
    __syncthreads();
    if (i + 1 < end) fetch_item(plan.work_tiles[i + 1], rows);
    locate_queries(params, rows, kLargeRows);
    __syncthreads();
    copy_queries<T, kLargeDims.qk>(params, rows, shared, kLargeRows);
    ptx::cp_async_commit();
    bind_rows(params, plan, rows);
    LargeWay<T, kLargeRows>(params, rows.context, rows, shared, scores).run(results);
    __syncthreads();
    finish_rows<kLargeDims.v>(params, rows, results, 1, running);
    const int32_t merge = rows.context.item.combine_tile;
    __syncthreads();
    if (merge >= 0 && params.combine_counters != nullptr) merge_if_last<kLargeDims.v>(params, merge);
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm80
