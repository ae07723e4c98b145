#pragma once

#include "kernels/cuda/plain/attention/tile.cuh"
#include "planner/partition_rule.hpp"

/// One worker's items. A warp owns a row's scores, a thread owns a component of the output for some of the rows.
/// Everything about a row depends on the row and on tiles of 32 keys at absolute local positions alone.
namespace folio::inline v0::kernels::cuda::plain {

/// What is known of each row of an item, in shared memory.
struct RowInfo {
  int64_t position[kRows];
  int32_t visible_begin[kRows];  ///< local tokens
  int32_t visible_end[kRows];
  float logit_scale[kRows];  ///< to base-2 units where there is no cap
  float value_scale[kRows];
  float alibi_slope[kRows];
  float max[kRows];
  float sum[kRows];
  float saved_max[kRows];
  float saved_sum[kRows];
  float rescale[kRows];
  uint32_t visible[kRows];  ///< of this tile's keys
  float p[kRows][kTokens];
};

template <typename T>
class Worker {
 public:
  __device__ Worker(const AttentionParams& params, unsigned char* dynamic, RowInfo& rows)
      : params_(params),
        plan_(params.plan->view),
        group_size_(params.num_q_heads / params.num_kv_heads),
        qk_stride_(params.head_dim_qk + kRowPadding),
        v_stride_(params.head_dim_v + kRowPadding),
        q_(reinterpret_cast<T*>(dynamic)),
        k_(q_ + kRows * qk_stride_),
        v_(k_ + kTokens * qk_stride_),
        rows_(rows),
        row_groups_(kThreads / params.head_dim_v),
        dim_(static_cast<int32_t>(threadIdx.x) % params.head_dim_v),
        first_row_(static_cast<int32_t>(threadIdx.x) / params.head_dim_v) {}

  __device__ void run(int32_t worker) {
    const int32_t end = plan_.worker_indptr[worker + 1];
    for (int32_t i = plan_.worker_indptr[worker]; i < end; ++i) run_item(plan_.items[i]);
  }

 private:
  __device__ void run_item(const planner::WorkItem& item) {
    const bool start = (item.flags & planner::kStart) != 0;
    const bool split = (item.flags & planner::kFold) != 0 && !start;
    num_rows_ = item.row_end - item.row_begin;
    if (start) load_queries(item);
    if (start || split) begin_state(split);
    if (item.kv_begin < item.kv_end) {
      first_pos_ = plan_.segments[item.segment].first_pos[item.kv_row];
      shard_ = plan_.segments[item.segment].shard;
      bind_rows(item);
      __syncthreads();
      for (int32_t first = item.kv_begin / kTokens * kTokens; first < item.kv_end; first += kTokens) {
        load_tile(item, first);
        __syncthreads();
        score(first);
        __syncthreads();
        accumulate();
        __syncthreads();
      }
    } else {
      __syncthreads();
    }
    if (split) fold();
    if ((item.flags & planner::kFinish) != 0) finish(item);
    __syncthreads();
  }

  __device__ void load_queries(const planner::WorkItem& item) {
    const T* const q = static_cast<const T*>(params_.q);
    for (int32_t i = threadIdx.x; i < num_rows_ * params_.head_dim_qk; i += kThreads) {
      const int32_t row = i / params_.head_dim_qk;
      const int32_t d = i % params_.head_dim_qk;
      const int32_t packed = item.row_begin + row;
      const int64_t token = packed / group_size_;
      const int32_t q_head = item.kv_head * group_size_ + packed % group_size_;
      q_[row * qk_stride_ + d] = q[token * params_.q_token_stride + q_head * params_.q_head_stride + d];
    }
  }

  /// A new state; the old one is kept where it will be folded with the new one.
  __device__ void begin_state(bool keep) {
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      if (keep) saved_[r] = acc_[r];
      acc_[r] = 0.0f;
    }
    if (threadIdx.x < kRows) {
      if (keep) {
        rows_.saved_max[threadIdx.x] = rows_.max[threadIdx.x];
        rows_.saved_sum[threadIdx.x] = rows_.sum[threadIdx.x];
      }
      rows_.max[threadIdx.x] = -INFINITY;
      rows_.sum[threadIdx.x] = 0.0f;
    }
  }

  __device__ void bind_rows(const planner::WorkItem& item) {
    const int32_t row = threadIdx.x;
    if (row >= num_rows_) return;
    const planner::SegmentLengths& lengths = plan_.segments[item.segment];
    const SegmentParams& segment = params_.segments[item.segment];
    const int32_t packed = item.row_begin + row;
    const int32_t token = packed / group_size_;
    int32_t request = item.request;
    while (plan_.cu_q[request + 1] <= token) ++request;
    const int64_t position = int64_t{plan_.q_first_pos[request]} + token - plan_.cu_q[request];
    const planner::KeySight sight =
        planner::key_sight(params_.mask, lengths.mask, params_.window_left, params_.window_right);
    const planner::TokenRange range = planner::visible_range(
        {lengths.first_pos[item.kv_row], lengths.kv_len[item.kv_row], lengths.shard}, sight, position);
    rows_.position[row] = position;
    rows_.visible_begin[row] = static_cast<int32_t>(range.begin < item.kv_begin ? item.kv_begin : range.begin);
    rows_.visible_end[row] = static_cast<int32_t>(range.end > item.kv_end ? item.kv_end : range.end);
    rows_.logit_scale[row] = scale_at(segment.k_scale, request, item.kv_head) * params_.sm_scale;
    rows_.value_scale[row] = scale_at(segment.v_scale, request, item.kv_head);
    const int32_t q_head = item.kv_head * group_size_ + packed % group_size_;
    rows_.alibi_slope[row] = params_.alibi_slopes == nullptr ? 0.0f : params_.alibi_slopes[q_head];
  }

  /// Keys and values of tokens [first, first + kTokens); zeros for those that are not the item's.
  __device__ void load_tile(const planner::WorkItem& item, int32_t first) {
    const SegmentParams& segment = params_.segments[item.segment];
    if (segment.wide) {
      load_wide(segment, item, first, params_.head_dim_qk, segment.k_strides, segment.k, k_, qk_stride_);
      load_wide(segment, item, first, params_.head_dim_v, segment.v_strides, segment.v, v_, v_stride_);
      return;
    }
    const int32_t lane = threadIdx.x % 32;
    for (int32_t t = threadIdx.x / 32; t < kTokens; t += kWarps) {
      const int32_t token = first + t;
      const bool owned = token >= item.kv_begin && token < item.kv_end;
      const Place place = owned ? locate(segment, item, token) : Place{};
      const T* const k = static_cast<const T*>(segment.k) + place.in(segment.k_strides, item.kv_head);
      const T* const v = static_cast<const T*>(segment.v) + place.in(segment.v_strides, item.kv_head);
      for (int32_t d = lane; d < params_.head_dim_qk; d += 32) k_[t * qk_stride_ + d] = owned ? k[d] : T(0.0f);
      for (int32_t d = lane; d < params_.head_dim_v; d += 32) v_[t * v_stride_ + d] = owned ? v[d] : T(0.0f);
    }
  }

  /// The same for keys or for values whose rows begin at multiples of 16 bytes: a thread loads 8 elements at a time.
  __device__ static void load_wide(const SegmentParams& segment, const planner::WorkItem& item, int32_t first,
                                   int32_t head_dim, const KvStrides& strides, const void* from, T* to,
                                   int32_t to_stride) {
    const int32_t pieces = head_dim / 8;
    for (int32_t i = threadIdx.x; i < kTokens * pieces; i += kThreads) {
      const int32_t t = i / pieces;
      const int32_t d = i % pieces * 8;
      const int32_t token = first + t;
      uint4 piece{};
      if (token >= item.kv_begin && token < item.kv_end) {
        const int64_t at = locate(segment, item, token).in(strides, item.kv_head) + d;
        piece = *reinterpret_cast<const uint4*>(static_cast<const T*>(from) + at);
      }
      auto* const row = reinterpret_cast<uint32_t*>(to + t * to_stride + d);  // rows are padded to 4 bytes, not to 16
      row[0] = piece.x;
      row[1] = piece.y;
      row[2] = piece.z;
      row[3] = piece.w;
    }
  }

  /// Weights of a tile's keys, relative to the rows' new maxima. Each warp takes every kWarps-th row, each lane a key.
  __device__ void score(int32_t first) {
    const int32_t lane = threadIdx.x % 32;
    for (int32_t row = threadIdx.x / 32; row < num_rows_; row += kWarps) {
      const int32_t token = first + lane;
      const bool visible = token >= rows_.visible_begin[row] && token < rows_.visible_end[row];
      const float logit = visible ? logit_of(row, token, lane) : -INFINITY;
      float most = logit;
#pragma unroll
      for (int32_t step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
      const float old = rows_.max[row];
      most = fmaxf(most, old);
      const float weight = !visible || logit == -INFINITY ? 0.0f : exp2f(logit - most);
      float sum = weight;
#pragma unroll
      for (int32_t step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      rows_.p[row][lane] = weight;
      const uint32_t seen = __ballot_sync(0xffffffffu, visible);
      __syncwarp();
      if (lane == 0) {
        const float rescale = old == most ? 1.0f : exp2f(old - most);
        rows_.rescale[row] = rescale;
        rows_.max[row] = most;
        rows_.sum[row] = rows_.sum[row] * rescale + sum;
        rows_.visible[row] = seen;
      }
    }
  }

  __device__ float logit_of(int32_t row, int32_t token, int32_t lane) const {
    using Two = typename Pair<T>::Type;
    const auto* const q = reinterpret_cast<const Two*>(q_ + row * qk_stride_);
    const auto* const k = reinterpret_cast<const Two*>(k_ + lane * qk_stride_);
    float dot = 0.0f;
    for (int32_t i = 0; i < params_.head_dim_qk / 2; ++i) {
      const float2 a = to_float2(q[i]);
      const float2 b = to_float2(k[i]);
      dot = fmaf(a.x, b.x, dot);
      dot = fmaf(a.y, b.y, dot);
    }
    float logit = dot * rows_.logit_scale[row];
    if (params_.soft_cap != 0.0f) logit = params_.soft_cap * tanhf(logit / params_.soft_cap);
    if (params_.alibi_slopes != nullptr) {
      const int64_t key = first_pos_ + planner::shard_offset(shard_, token);
      const int64_t distance = rows_.position[row] > key ? rows_.position[row] - key : key - rows_.position[row];
      logit -= rows_.alibi_slope[row] * static_cast<float>(distance);
    }
    return logit * kLog2E;
  }

  /// Adds the tile's values. A key that a row does not see is left out, not multiplied with zero: it may be NaN.
  __device__ void accumulate() {
    if (first_row_ >= row_groups_) return;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first_row_ + i * row_groups_;
      if (row >= num_rows_) break;
      acc_[i] *= rows_.rescale[row];
    }
    for (int32_t t = 0; t < kTokens; ++t) {
      const float value = to_float(v_[t * v_stride_ + dim_]);
#pragma unroll
      for (int32_t i = 0; i < kRows; ++i) {
        const int32_t row = first_row_ + i * row_groups_;
        if (row >= num_rows_) break;
        if ((rows_.visible[row] >> t & 1u) == 0) continue;
        acc_[i] = fmaf(rows_.p[row][t], value * rows_.value_scale[row], acc_[i]);
      }
    }
  }

  __device__ void fold() {
    if (first_row_ < row_groups_) {
#pragma unroll
      for (int32_t i = 0; i < kRows; ++i) {
        const int32_t row = first_row_ + i * row_groups_;
        if (row >= num_rows_) continue;
        const Fold f = fold_factors(rows_.saved_max[row], rows_.saved_sum[row], rows_.max[row], rows_.sum[row]);
        acc_[i] = cuda::fold(f, saved_[i], acc_[i]);
      }
    }
    __syncthreads();
    const int32_t row = threadIdx.x;
    if (row < num_rows_) {
      const Fold f = fold_factors(rows_.saved_max[row], rows_.saved_sum[row], rows_.max[row], rows_.sum[row]);
      rows_.sum[row] = cuda::fold(f, rows_.saved_sum[row], rows_.sum[row]);
      rows_.max[row] = f.max;
    }
    __syncthreads();
  }

  __device__ void finish(const planner::WorkItem& item) {
    if (first_row_ >= row_groups_) return;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first_row_ + i * row_groups_;
      if (row >= num_rows_) continue;
      if (item.partial >= 0) {
        const int64_t partial = int64_t{item.partial} + row;
        params_.partial_acc[partial * params_.head_dim_v + dim_] = acc_[i];
        if (dim_ != 0) continue;
        params_.partial_max[partial] = rows_.max[row];
        params_.partial_sum[partial] = rows_.sum[row];
        continue;
      }
      const int32_t packed = item.row_begin + row;
      const int32_t token = packed / group_size_;
      const int32_t q_head = item.kv_head * group_size_ + packed % group_size_;
      const RowEnd end = end_row(params_, q_head, rows_.max[row], rows_.sum[row]);
      write_out(params_, token, q_head, dim_, acc_[i], end);
      if (dim_ == 0) write_lse(params_, token, q_head, end);
    }
  }

  const AttentionParams& params_;
  const planner::PlanView& plan_;
  const int32_t group_size_;
  const int32_t qk_stride_;
  const int32_t v_stride_;
  T* const q_;
  T* const k_;
  T* const v_;
  RowInfo& rows_;
  const int32_t row_groups_;  ///< how many rows are worked on at once
  const int32_t dim_;         ///< this thread's component of the output, for rows first_row_ + i * row_groups_
  const int32_t first_row_;
  int32_t num_rows_ = 0;
  int64_t first_pos_ = 0;
  KvShard shard_;
  float acc_[kRows];
  float saved_[kRows];
};

}  // namespace folio::inline v0::kernels::cuda::plain
