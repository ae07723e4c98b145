#pragma once

#include "kernels/cuda/common/ds_mla.cuh"
#include "kernels/cuda/common/nvfp4.cuh"
#include "kernels/cuda/plain/rope.cuh"
#include "kernels/cuda/plain/smem.cuh"
#include "scheduler/mask_bounds.hpp"

/// "cuda-plain", the reference kernel of the GPU: short, float32, no tensor cores. A CTA computes the work tiles of one
/// list.
///
///   8 warps       S: warp w has rows w and w + 8, lane = token     O: thread = component(s) for some of the rows
///   KV tile       32 tokens; K comes to shared memory 64 components at a time, V is read from global memory
///   barriers      __syncthreads between K, S, P and O; nothing is pipelined but by the other CTA of the SM
///   registers     O: 16 rows x 1 component (2 above 256), twice: a copy waits while a fixed split is computed
///   shared memory Q (then O) as float32 | K, 32 tokens | SharedStorage: row_max, row_sum, P
///
/// A row's bits depend on the row and on KV tiles of 32 tokens at absolute local positions alone.
namespace folio::inline v0::kernels::cuda::plain {

/// `Parts`: components of O for each thread, one for every kThreads of head_dim_v.
template <int32_t Parts>
class PlainCta {
 public:
  __device__ PlainCta(const AttentionParams& params, const DynamicMemory& memory, SharedStorage& rows)
      : params_(params),
        plan_(params.plan->view),
        group_size_(params.num_q_heads / params.num_kv_heads),
        half_(params.head_dim_qk / 2),
        memory_(memory),
        storage_(rows),
        row_groups_(Parts > 1 ? 1 : kThreads / params.head_dim_v),
        dim_(Parts > 1 ? static_cast<int32_t>(threadIdx.x) : static_cast<int32_t>(threadIdx.x) % params.head_dim_v),
        first_row_(Parts > 1 ? 0 : static_cast<int32_t>(threadIdx.x) / params.head_dim_v) {}

  __device__ void run(int32_t worker) {
    for (int32_t d = threadIdx.x; params_.rope.on && d < half_; d += kThreads) {
      memory_.quarter_turns[d] = quarter_turns_of(params_.rope, params_.head_dim_qk, d);
    }
    __syncthreads();
    const int32_t end = plan_.worker_indptr[worker + 1];
    for (int32_t i = plan_.worker_indptr[worker]; i < end; ++i) run_work_tile(plan_.work_tiles[i]);
  }

 private:
  __device__ void run_work_tile(const scheduler::WorkTile& work_tile) {
    const bool start = (work_tile.flags & scheduler::kStart) != 0;
    const bool split = (work_tile.flags & scheduler::kFold) != 0 && !start;
    num_rows_ = work_tile.row_end - work_tile.row_begin;
    if (start) load_queries(work_tile);
    if (start || split) begin_state(split);
    if (work_tile.kv_begin < work_tile.kv_end) {
      bind_rows(work_tile);
      __syncthreads();
      accumulate(work_tile);
    } else {
      __syncthreads();
    }
    if (split) fold();
    if ((work_tile.flags & scheduler::kFinish) != 0) finish(work_tile);
    __syncthreads();
  }

  /// A row of a work tile.
  struct Row {
    int32_t token;
    int32_t q_head;
    int32_t request;
    int32_t index;  ///< of the token in its request
    int64_t position;
  };
  __device__ Row row_of(const scheduler::WorkTile& work_tile, int32_t row) const {
    const int32_t packed = work_tile.row_begin + row;
    Row out{packed / group_size_, work_tile.kv_head * group_size_ + packed % group_size_, work_tile.request, 0, 0};
    while (plan_.cu_q[out.request + 1] <= out.token) ++out.request;
    out.index = out.token - plan_.cu_q[out.request];
    out.position = int64_t{plan_.q_first_pos[out.request]} + out.index;
    return out;
  }

  __device__ void load_queries(const scheduler::WorkTile& work_tile) {
    for (int32_t i = threadIdx.x; i < num_rows_ * half_; i += kThreads) {
      const int32_t row = i / half_;
      const int32_t d = i % half_;
      const Row at = row_of(work_tile, row);
      const int64_t first = at.token * params_.q_token_stride + at.q_head * params_.q_head_stride + d;
      float x = decode_bits(load_bits(params_.q, params_.q_dtype, first), params_.q_dtype);
      float y = decode_bits(load_bits(params_.q, params_.q_dtype, first + half_), params_.q_dtype);
      if (params_.rope.on) rotate(memory_.quarter_turns[d], at.position, x, y);
      float* const to = memory_.q + row * params_.head_dim_qk + d;
      to[0] = x;
      to[half_] = y;
    }
  }

  /// A new state. `keep`: saves the old one, which fold() takes.
  __device__ void begin_state(bool keep) {
#pragma unroll
    for (int32_t i = 0; i < kRows * Parts; ++i) {
      if (keep) saved_[i] = acc_[i];
      acc_[i] = 0.0f;
    }
    if (threadIdx.x < kRows) {
      if (keep) {
        storage_.saved_max[threadIdx.x] = storage_.max[threadIdx.x];
        storage_.saved_sum[threadIdx.x] = storage_.sum[threadIdx.x];
      }
      storage_.max[threadIdx.x] = -INFINITY;
      storage_.sum[threadIdx.x] = 0.0f;
    }
  }

  __device__ void bind_rows(const scheduler::WorkTile& work_tile) {
    const int32_t row = threadIdx.x;
    if (row >= num_rows_) return;
    const scheduler::SegmentLengths& lengths = plan_.segments[work_tile.segment];
    const SegmentParams& segment = params_.segments[work_tile.segment];
    const Row at = row_of(work_tile, row);
    const scheduler::MaskBounds bounds = scheduler::mask_bounds(params_.mask, lengths.mask);
    const scheduler::TokenRange range = scheduler::visible_to_token(
        {lengths.first_pos[work_tile.kv_row], lengths.kv_len[work_tile.kv_row], lengths.shard}, bounds,
        plan_.visible_positions, at.token, at.position);
    storage_.position[row] = at.position;
    storage_.visible_begin[row] =
        static_cast<int32_t>(range.begin < work_tile.kv_begin ? work_tile.kv_begin : range.begin);
    storage_.visible_end[row] = static_cast<int32_t>(range.end > work_tile.kv_end ? work_tile.kv_end : range.end);
    storage_.mask_begin[row] = INT32_MAX;
    if (params_.mask.kind == MaskKind::kCustom && lengths.mask == SegmentMask::kAsConfig) {
      const int32_t mask_begin = plan_.mask_first_column[at.request] - lengths.key_offset[at.request];
      storage_.mask_begin[row] = mask_begin;
      storage_.mask_bit[row] =
          8 * plan_.mask_byte_indptr[at.request] + int64_t{at.index} * plan_.mask_columns[at.request] - mask_begin;
    }
    storage_.logit_scale[row] = scale_at(params_.q_scale, at.request, work_tile.kv_head) *
                                scale_at(segment.k_scale, at.request, work_tile.kv_head) * params_.sm_scale;
    storage_.value_scale[row] = scale_at(segment.v_scale, at.request, work_tile.kv_head);
    storage_.alibi_slope[row] = params_.alibi_slopes == nullptr ? 0.0f : params_.alibi_slopes[at.q_head];
  }

  /// Mainloop over the KV tiles of the work tile. Rows are bound.
  __device__ void accumulate(const scheduler::WorkTile& work_tile) {
    const SegmentParams& segment = params_.segments[work_tile.segment];
    first_pos_ = plan_.segments[work_tile.segment].first_pos[work_tile.kv_row];
    shard_ = plan_.segments[work_tile.segment].shard;
    int32_t begin = INT32_MAX;  // some row sees tokens of [begin, end)
    int32_t end = 0;
    for (int32_t row = 0; row < num_rows_; ++row) {
      if (storage_.visible_begin[row] >= storage_.visible_end[row]) continue;
      begin = min(begin, storage_.visible_begin[row]);
      end = max(end, storage_.visible_end[row]);
    }
    for (int32_t first = begin / kKvTile * kKvTile; first < end; first += kKvTile) {
      const int32_t token = first + static_cast<int32_t>(threadIdx.x);
      if (threadIdx.x < kKvTile) {
        const bool read = token >= begin && token < end;
        const Place place = read ? locate(segment, work_tile, token) : Place{};
        storage_.key[threadIdx.x] = read ? place.in(segment.k_strides, work_tile.kv_head) : kUnread;
        storage_.value[threadIdx.x] = read ? place.in(segment.v_strides, work_tile.kv_head) : kUnread;
      }
      __syncthreads();
      score(segment, first);
      __syncthreads();
      add_values(segment);
      __syncthreads();
    }
  }

  /// Component `d` of the row at `at`, as bits of component_dtype.
  static __device__ uint32_t load_component(const SegmentParams& segment, const void* data, int64_t at, int32_t d) {
    if (!segment.ds_mla) return load_bits(data, segment.dtype, at + d);
    return __float_as_uint(load_ds_mla(static_cast<const std::byte*>(data) + at, d));
  }
  static __device__ DType component_dtype(const SegmentParams& segment) {
    return segment.ds_mla ? DType::kFloat32 : segment.dtype;
  }

  /// Pairs [first_pair, first_pair + kPairs) of K, rotated if asked for; zeros for tokens that are not read.
  __device__ void load_keys(const SegmentParams& segment, int32_t first, int32_t first_pair) {
    constexpr int32_t kStep = kThreads / kPairs;
    constexpr int32_t kMine = kKvTile / kStep;
    const int32_t pair = static_cast<int32_t>(threadIdx.x) % kPairs;
    const int32_t begin = static_cast<int32_t>(threadIdx.x) / kPairs;
    const int32_t d = first_pair + pair;
    uint32_t bits[kMine][2] = {};  // zero in every type
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      const int64_t at = storage_.key[begin + i * kStep];
      if (at == kUnread || d >= half_) continue;
      bits[i][0] = load_component(segment, segment.k, at, d);
      bits[i][1] = load_component(segment, segment.k, at, half_ + d);
    }
    const DType dtype = component_dtype(segment);
    float* const to = memory_.k + begin * kKeyStride + pair;
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      to[i * kStep * kKeyStride] = decode_bits(bits[i][0], dtype);
      to[i * kStep * kKeyStride + kPairs] = decode_bits(bits[i][1], dtype);
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

  /// S and P of a KV tile. Each warp takes every kWarps-th row, each lane a token. Passes barriers.
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
      if (row < num_rows_) online_softmax(row, first + lane, lane, dot[i]);
    }
  }

  __device__ bool is_visible_to(int32_t row, int32_t token) const {
    if (token < storage_.visible_begin[row] || token >= storage_.visible_end[row]) return false;
    if (token < storage_.mask_begin[row]) return true;
    const int64_t bit = storage_.mask_bit[row] + token;
    return (params_.custom_mask[bit >> 3] >> (bit & 7) & 1) != 0;
  }

  /// Online softmax of a row, by a warp.
  __device__ void online_softmax(int32_t row, int32_t token, int32_t lane, float dot) {
    const bool visible = is_visible_to(row, token);
    const float logit = visible ? logit_of(row, token, dot) : -INFINITY;
    float row_max = logit;
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, step));
    const float old = storage_.max[row];
    row_max = fmaxf(row_max, old);
    const float p = !visible || logit == -INFINITY ? 0.0f : exp2f(logit - row_max);
    float sum = p;
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    storage_.p[row][lane] = p;
    const uint32_t seen = __ballot_sync(0xffffffffu, visible);
    __syncwarp();
    if (lane == 0) {
      const float rescale = old == row_max ? 1.0f : exp2f(old - row_max);
      storage_.rescale[row] = rescale;
      storage_.max[row] = row_max;
      storage_.sum[row] = storage_.sum[row] * rescale + sum;
      storage_.visible[row] = seen;
    }
  }

  __device__ float logit_of(int32_t row, int32_t token, float dot) const {
    float logit = dot * storage_.logit_scale[row];
    if (params_.soft_cap != 0.0f) logit = params_.soft_cap * tanhf(logit / params_.soft_cap);
    if (params_.alibi_slopes != nullptr) {
      const int64_t apart = storage_.position[row] - key_position(token);
      logit -= storage_.alibi_slope[row] * static_cast<float>(apart < 0 ? -apart : apart);
    }
    return logit * kLog2E;
  }

  /// O += P V. A token that a row does not see is left out, not multiplied with p = 0: V may hold NaN there.
  __device__ void add_values(const SegmentParams& segment) {
    if (first_row_ >= row_groups_) return;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first_row_ + i * row_groups_;
      if (row >= num_rows_) break;
#pragma unroll
      for (int32_t p = 0; p < Parts; ++p) acc_[i * Parts + p] *= storage_.rescale[row];
    }
    constexpr int32_t kAhead = 4;
    for (int32_t first = 0; first < kKvTile; first += kAhead) {
      uint32_t bits[kAhead][Parts] = {};  // zero in every type
#pragma unroll
      for (int32_t t = 0; t < kAhead; ++t) {
        const int64_t at = storage_.value[first + t];
#pragma unroll
        for (int32_t p = 0; p < Parts; ++p) {
          const int32_t d = dim_ + p * kThreads;
          if (at != kUnread && d < params_.head_dim_v) bits[t][p] = load_component(segment, segment.v, at, d);
        }
      }
#pragma unroll
      for (int32_t t = 0; t < kAhead; ++t) {
        float values[Parts];
#pragma unroll
        for (int32_t p = 0; p < Parts; ++p) values[p] = decode_bits(bits[t][p], component_dtype(segment));
#pragma unroll
        for (int32_t i = 0; i < kRows; ++i) {
          const int32_t row = first_row_ + i * row_groups_;
          if (row >= num_rows_) break;
          if ((storage_.visible[row] >> (first + t) & 1u) == 0) continue;
#pragma unroll
          for (int32_t p = 0; p < Parts; ++p) {
            float& acc = acc_[i * Parts + p];
            acc = fmaf(storage_.p[row][first + t], values[p] * storage_.value_scale[row], acc);
          }
        }
      }
    }
  }

  __device__ void fold() {
    const int32_t thread = threadIdx.x;
    if (thread < num_rows_) {
      const Fold f = fold_factors(storage_.saved_max[thread], storage_.saved_sum[thread], storage_.max[thread],
                                  storage_.sum[thread]);
      storage_.sum[thread] = cuda::fold(f, storage_.saved_sum[thread], storage_.sum[thread]);
      storage_.max[thread] = f.max;
      storage_.rescale[thread] = f.mine;
      storage_.here[thread] = f.other;
    }
    __syncthreads();
    if (first_row_ >= row_groups_) return;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first_row_ + i * row_groups_;
      if (row >= num_rows_) break;
      const Fold f{0.0f, storage_.rescale[row], storage_.here[row]};
#pragma unroll
      for (int32_t p = 0; p < Parts; ++p) {
        acc_[i * Parts + p] = cuda::fold(f, saved_[i * Parts + p], acc_[i * Parts + p]);
      }
    }
  }

  /// The epilogue. O goes through shared memory, so that there is one copy of the code that writes it.
  __device__ void finish(const scheduler::WorkTile& work_tile) {
    __syncthreads();  // Q is consumed
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
      finish_component(work_tile, i / params_.head_dim_v, i % params_.head_dim_v, memory_.q[i]);
    }
  }

  __device__ void finish_component(const scheduler::WorkTile& work_tile, int32_t row, int32_t d, float acc) {
    if (work_tile.partial >= 0) {
      const int64_t partial = int64_t{work_tile.partial} + row;
      params_.partial_acc[partial * params_.head_dim_v + d] = acc;
      if (d != 0) return;
      params_.partial_row_max[partial] = storage_.max[row];
      params_.partial_row_sum[partial] = storage_.sum[row];
      return;
    }
    const int32_t packed = work_tile.row_begin + row;
    const int32_t token = packed / group_size_;
    const int32_t q_head = work_tile.kv_head * group_size_ + packed % group_size_;
    const RowEnd end = end_row(params_, q_head, storage_.max[row], storage_.sum[row]);
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
  SharedStorage& storage_;
  const int32_t row_groups_;  ///< rows computed at once
  const int32_t dim_;  ///< components dim_ + p * kThreads are this thread's, for rows first_row_ + i * row_groups_
  const int32_t first_row_;
  int32_t num_rows_ = 0;
  int64_t first_pos_ = 0;
  KvShard shard_;
  float acc_[kRows * Parts];
  float saved_[kRows * Parts];
};

}  // namespace folio::inline v0::kernels::cuda::plain
