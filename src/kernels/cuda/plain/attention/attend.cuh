#pragma once

#include "kernels/cuda/common/nvfp4_row.cuh"
#include "kernels/cuda/common/rotation.cuh"
#include "kernels/cuda/plain/attention/tile.cuh"
#include "scheduler/mask_bounds.hpp"

/// One worker's items. A warp owns a row's scores, a thread owns components of the output for some of the rows.
/// Everything about a row depends on the row and on tiles of 32 keys at absolute local positions alone.
namespace folio::inline v0::kernels::cuda::plain {

/// `Parts`: components of the output that a thread owns: as many for every kThreads of head_dim_v, begun ones too.
template <int32_t Parts>
class Worker {
 public:
  __device__ Worker(const AttentionParams& params, const DynamicMemory& memory, RowInfo& rows)
      : params_(params),
        plan_(params.plan->view),
        group_size_(params.num_q_heads / params.num_kv_heads),
        half_(params.head_dim_qk / 2),
        memory_(memory),
        rows_(rows),
        row_groups_(Parts > 1 ? 1 : kThreads / params.head_dim_v),
        dim_(Parts > 1 ? static_cast<int32_t>(threadIdx.x) : static_cast<int32_t>(threadIdx.x) % params.head_dim_v),
        first_row_(Parts > 1 ? 0 : static_cast<int32_t>(threadIdx.x) / params.head_dim_v) {}

  __device__ void run(int32_t worker) {
    for (int32_t d = threadIdx.x; params_.rope.on && d < half_; d += kThreads) {
      memory_.quarter_turns[d] = quarter_turns_of(params_.rope, params_.head_dim_qk, d);
    }
    __syncthreads();
    const int32_t end = plan_.worker_indptr[worker + 1];
    for (int32_t i = plan_.worker_indptr[worker]; i < end; ++i) run_item(plan_.work_tiles[i]);
  }

 private:
  __device__ void run_item(const scheduler::WorkTile& item) {
    const bool start = (item.flags & scheduler::kStart) != 0;
    const bool split = (item.flags & scheduler::kFold) != 0 && !start;
    num_rows_ = item.row_end - item.row_begin;
    if (start) load_queries(item);
    if (start || split) begin_state(split);
    if (item.kv_begin < item.kv_end) {
      bind_rows(item);
      __syncthreads();
      accumulate(item);
    } else {
      __syncthreads();
    }
    if (split) fold();
    if ((item.flags & scheduler::kFinish) != 0) finish(item);
    __syncthreads();
  }

  /// A row of an item: its token, q head, request and position.
  struct Row {
    int32_t token;
    int32_t q_head;
    int32_t request;
    int32_t index;  ///< of the token in its request
    int64_t position;
  };
  __device__ Row row_of(const scheduler::WorkTile& item, int32_t row) const {
    const int32_t packed = item.row_begin + row;
    Row out{packed / group_size_, item.kv_head * group_size_ + packed % group_size_, item.request, 0, 0};
    while (plan_.cu_q[out.request + 1] <= out.token) ++out.request;
    out.index = out.token - plan_.cu_q[out.request];
    out.position = int64_t{plan_.q_first_pos[out.request]} + out.index;
    return out;
  }

  __device__ void load_queries(const scheduler::WorkTile& item) {
    for (int32_t i = threadIdx.x; i < num_rows_ * half_; i += kThreads) {
      const int32_t row = i / half_;
      const int32_t d = i % half_;
      const Row at = row_of(item, row);
      const int64_t first = at.token * params_.q_token_stride + at.q_head * params_.q_head_stride + d;
      float x = decode_bits(load_bits(params_.q, params_.q_dtype, first), params_.q_dtype);
      float y = decode_bits(load_bits(params_.q, params_.q_dtype, first + half_), params_.q_dtype);
      if (params_.rope.on) rotate(memory_.quarter_turns[d], at.position, x, y);
      float* const to = memory_.q + row * params_.head_dim_qk + d;
      to[0] = x;
      to[half_] = y;
    }
  }

  /// A new state; the old one is kept where it will be folded with the new one.
  __device__ void begin_state(bool keep) {
#pragma unroll
    for (int32_t i = 0; i < kRows * Parts; ++i) {
      if (keep) saved_[i] = acc_[i];
      acc_[i] = 0.0f;
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

  __device__ void bind_rows(const scheduler::WorkTile& item) {
    const int32_t row = threadIdx.x;
    if (row >= num_rows_) return;
    const scheduler::SegmentLengths& lengths = plan_.segments[item.segment];
    const SegmentParams& segment = params_.segments[item.segment];
    const Row at = row_of(item, row);
    const scheduler::MaskBounds sight =
        scheduler::mask_bounds(params_.mask, lengths.mask, params_.window_left, params_.window_right);
    const scheduler::TokenRange range = scheduler::visible_range(
        {lengths.first_pos[item.kv_row], lengths.kv_len[item.kv_row], lengths.shard}, sight, at.position);
    rows_.position[row] = at.position;
    rows_.visible_begin[row] = static_cast<int32_t>(range.begin < item.kv_begin ? item.kv_begin : range.begin);
    rows_.visible_end[row] = static_cast<int32_t>(range.end > item.kv_end ? item.kv_end : range.end);
    rows_.mask_begin[row] = INT32_MAX;
    if (params_.mask == MaskKind::kCustom && lengths.mask == SegmentMask::kAsConfig) {
      const int32_t mask_begin = plan_.mask_first_column[at.request] - lengths.key_offset[at.request];
      rows_.mask_begin[row] = mask_begin;
      rows_.mask_bit[row] =
          8 * plan_.mask_byte_indptr[at.request] + int64_t{at.index} * plan_.mask_columns[at.request] - mask_begin;
    }
    rows_.logit_scale[row] = scale_at(params_.q_scale, at.request, item.kv_head) *
                             scale_at(segment.k_scale, at.request, item.kv_head) * params_.sm_scale;
    rows_.value_scale[row] = scale_at(segment.v_scale, at.request, item.kv_head);
    rows_.alibi_slope[row] = params_.alibi_slopes == nullptr ? 0.0f : params_.alibi_slopes[at.q_head];
  }

  /// Adds the item's keys. Rows are bound.
  __device__ void accumulate(const scheduler::WorkTile& item) {
    const SegmentParams& segment = params_.segments[item.segment];
    first_pos_ = plan_.segments[item.segment].first_pos[item.kv_row];
    shard_ = plan_.segments[item.segment].shard;
    int32_t begin = INT32_MAX;  // some row sees tokens of [begin, end)
    int32_t end = 0;
    for (int32_t row = 0; row < num_rows_; ++row) {
      if (rows_.visible_begin[row] >= rows_.visible_end[row]) continue;
      begin = min(begin, rows_.visible_begin[row]);
      end = max(end, rows_.visible_end[row]);
    }
    for (int32_t first = begin / kTokens * kTokens; first < end; first += kTokens) {
      const int32_t token = first + static_cast<int32_t>(threadIdx.x);
      if (threadIdx.x < kTokens) {
        const bool read = token >= begin && token < end;
        const Place place = read ? locate(segment, item, token) : Place{};
        rows_.key[threadIdx.x] = read ? place.in(segment.k_strides, item.kv_head) : kUnread;
        rows_.value[threadIdx.x] = read ? place.in(segment.v_strides, item.kv_head) : kUnread;
      }
      __syncthreads();
      score(segment, first);
      __syncthreads();
      add_values(segment);
      __syncthreads();
    }
  }

  /// Pairs [first_pair, first_pair + kPairs) of the tile's keys, turned where that is asked for; zeros for keys that
  /// are not read. A warp takes a key.
  __device__ void load_keys(const SegmentParams& segment, int32_t first, int32_t first_pair) {
    constexpr int32_t kStep = kThreads / kPairs;
    constexpr int32_t kMine = kTokens / kStep;
    const int32_t pair = static_cast<int32_t>(threadIdx.x) % kPairs;
    const int32_t begin = static_cast<int32_t>(threadIdx.x) / kPairs;
    const int32_t d = first_pair + pair;
    uint32_t bits[kMine][2] = {};  // zero in every type
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      const int64_t at = rows_.key[begin + i * kStep];
      if (at == kUnread || d >= half_) continue;
      bits[i][0] = load_bits(segment.k, segment.dtype, at + d);
      bits[i][1] = load_bits(segment.k, segment.dtype, at + half_ + d);
    }
    float* const to = memory_.k + begin * kKeyStride + pair;
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      to[i * kStep * kKeyStride] = decode_bits(bits[i][0], segment.dtype);
      to[i * kStep * kKeyStride + kPairs] = decode_bits(bits[i][1], segment.dtype);
    }
    if (!params_.rope.on || d >= half_) return;
#pragma unroll 1
    for (int32_t i = 0; i < kMine; ++i) {
      float* const key = to + i * kStep * kKeyStride;
      rotate(memory_.quarter_turns[d], key_position(first + begin + i * kStep), key[0], key[kPairs]);
    }
  }

  __device__ int64_t key_position(int32_t token) const {
    return first_pos_ + scheduler::shard_offset(shard_, token);
  }

  /// Weights of a tile's keys, relative to the rows' new maxima. Each warp takes every kWarps-th row, each lane a key.
  /// Passes barriers.
  __device__ void score(const SegmentParams& segment, int32_t first) {
    constexpr int32_t kMine = kRows / kWarps;
    const int32_t lane = threadIdx.x % 32;
    const int32_t warp = threadIdx.x / 32;
    float dot[kMine] = {};
    for (int32_t first_pair = 0; first_pair < half_; first_pair += kPairs) {
      load_keys(segment, first, first_pair);
      __syncthreads();
      const float* const k = memory_.k + lane * kKeyStride;
      const int32_t pairs = min(kPairs, half_ - first_pair);
#pragma unroll
      for (int32_t i = 0; i < kMine; ++i) {
        const int32_t row = warp + i * kWarps;
        if (row >= num_rows_) break;
        const float* const q = memory_.q + row * params_.head_dim_qk + first_pair;
        for (int32_t d = 0; d < pairs; ++d) {
          dot[i] = fmaf(q[d], k[d], dot[i]);
          dot[i] = fmaf(q[half_ + d], k[kPairs + d], dot[i]);
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      const int32_t row = warp + i * kWarps;
      if (row < num_rows_) weigh(row, first + lane, lane, dot[i]);
    }
  }

  __device__ bool sees(int32_t row, int32_t token) const {
    if (token < rows_.visible_begin[row] || token >= rows_.visible_end[row]) return false;
    if (token < rows_.mask_begin[row]) return true;
    const int64_t bit = rows_.mask_bit[row] + token;
    return (params_.custom_mask[bit >> 3] >> (bit & 7) & 1) != 0;
  }

  /// A row's products become weights, by a warp.
  __device__ void weigh(int32_t row, int32_t token, int32_t lane, float dot) {
    const bool visible = sees(row, token);
    const float logit = visible ? logit_of(row, token, dot) : -INFINITY;
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

  __device__ float logit_of(int32_t row, int32_t token, float dot) const {
    float logit = dot * rows_.logit_scale[row];
    if (params_.soft_cap != 0.0f) logit = params_.soft_cap * tanhf(logit / params_.soft_cap);
    if (params_.alibi_slopes != nullptr) {
      const int64_t apart = rows_.position[row] - key_position(token);
      logit -= rows_.alibi_slope[row] * static_cast<float>(apart < 0 ? -apart : apart);
    }
    return logit * kLog2E;
  }

  /// Adds the tile's values. A key that a row does not see is left out, not multiplied with zero: it may be NaN.
  __device__ void add_values(const SegmentParams& segment) {
    if (first_row_ >= row_groups_) return;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first_row_ + i * row_groups_;
      if (row >= num_rows_) break;
#pragma unroll
      for (int32_t p = 0; p < Parts; ++p) acc_[i * Parts + p] *= rows_.rescale[row];
    }
    constexpr int32_t kAhead = 4;
    for (int32_t first = 0; first < kTokens; first += kAhead) {
      uint32_t bits[kAhead][Parts] = {};  // zero in every type
#pragma unroll
      for (int32_t t = 0; t < kAhead; ++t) {
        const int64_t at = rows_.value[first + t];
#pragma unroll
        for (int32_t p = 0; p < Parts; ++p) {
          const int32_t d = dim_ + p * kThreads;
          if (at != kUnread && d < params_.head_dim_v) bits[t][p] = load_bits(segment.v, segment.dtype, at + d);
        }
      }
#pragma unroll
      for (int32_t t = 0; t < kAhead; ++t) {
        float values[Parts];
#pragma unroll
        for (int32_t p = 0; p < Parts; ++p) values[p] = decode_bits(bits[t][p], segment.dtype);
#pragma unroll
        for (int32_t i = 0; i < kRows; ++i) {
          const int32_t row = first_row_ + i * row_groups_;
          if (row >= num_rows_) break;
          if ((rows_.visible[row] >> (first + t) & 1u) == 0) continue;
#pragma unroll
          for (int32_t p = 0; p < Parts; ++p) {
            float& acc = acc_[i * Parts + p];
            acc = fmaf(rows_.p[row][first + t], values[p] * rows_.value_scale[row], acc);
          }
        }
      }
    }
  }

  __device__ void fold() {
    const int32_t thread = threadIdx.x;
    if (thread < num_rows_) {
      const Fold f =
          fold_factors(rows_.saved_max[thread], rows_.saved_sum[thread], rows_.max[thread], rows_.sum[thread]);
      rows_.sum[thread] = cuda::fold(f, rows_.saved_sum[thread], rows_.sum[thread]);
      rows_.max[thread] = f.max;
      rows_.rescale[thread] = f.mine;
      rows_.here[thread] = f.other;
    }
    __syncthreads();
    if (first_row_ >= row_groups_) return;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first_row_ + i * row_groups_;
      if (row >= num_rows_) break;
      const Fold f{0.0f, rows_.rescale[row], rows_.here[row]};
#pragma unroll
      for (int32_t p = 0; p < Parts; ++p) {
        acc_[i * Parts + p] = cuda::fold(f, saved_[i * Parts + p], acc_[i * Parts + p]);
      }
    }
  }

  /// Results go through shared memory, so that one copy of what writes them does for all.
  __device__ void finish(const scheduler::WorkTile& item) {
    __syncthreads();  // the queries have been used
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first_row_ + i * row_groups_;
      if (first_row_ >= row_groups_ || row >= num_rows_) break;
#pragma unroll
      for (int32_t p = 0; p < Parts; ++p) {
        const int32_t d = dim_ + p * kThreads;
        if (d < params_.head_dim_v) memory_.q[row * params_.head_dim_v + d] = acc_[i * Parts + p];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < num_rows_ * params_.head_dim_v; i += kThreads) {
      finish_component(item, i / params_.head_dim_v, i % params_.head_dim_v, memory_.q[i]);
    }
  }

  __device__ void finish_component(const scheduler::WorkTile& item, int32_t row, int32_t d, float acc) {
    if (item.partial >= 0) {
      const int64_t partial = int64_t{item.partial} + row;
      params_.partial_acc[partial * params_.head_dim_v + d] = acc;
      if (d != 0) return;
      params_.partial_row_max[partial] = rows_.max[row];
      params_.partial_row_sum[partial] = rows_.sum[row];
      return;
    }
    const int32_t packed = item.row_begin + row;
    const int32_t token = packed / group_size_;
    const int32_t q_head = item.kv_head * group_size_ + packed % group_size_;
    const RowEnd end = end_row(params_, q_head, rows_.max[row], rows_.sum[row]);
    if (params_.out_dtype == DType::kFloat4E2M1x2) {
      store_nvfp4<1>(params_, token, q_head, d, {row_value(end, acc)});
    } else {
      write_out(params_, token, q_head, d, acc, end);
    }
    if (d == 0) write_lse(params_, token, q_head, end);
  }

  const AttentionParams& params_;
  const scheduler::PlanView& plan_;
  const int32_t group_size_;
  const int32_t half_;  ///< of head_dim_qk
  const DynamicMemory memory_;
  RowInfo& rows_;
  const int32_t row_groups_;  ///< how many rows are worked on at once
  const int32_t dim_;  ///< components dim_ + p * kThreads are this thread's, for rows first_row_ + i * row_groups_
  const int32_t first_row_;
  int32_t num_rows_ = 0;
  int64_t first_pos_ = 0;
  KvShard shard_;
  float acc_[kRows * Parts];
  float saved_[kRows * Parts];
};

}  // namespace folio::inline v0::kernels::cuda::plain
