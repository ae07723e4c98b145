#include "kernels/cuda/common/merge_states/ranks.hpp"

#include <algorithm>
#include <numbers>

#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/merge_states/gather_header.cuh"
#include "kernels/cuda/common/numeric_conversion.cuh"

namespace folio::inline v0::kernels::cuda {

template <>
struct Raw<4, 4> {
  float4 bits;
};

namespace {

__device__ inline void decode(const Raw<4, 4>& raw, DType, float* values) {
  values[0] = raw.bits.x, values[1] = raw.bits.y, values[2] = raw.bits.z, values[3] = raw.bits.w;
}

constexpr int32_t kRankThreads = 256;
constexpr int32_t kWarps = kRankThreads / 32;
constexpr int32_t kShiftThreads = 128;

/// A thread takes words of 1, 2, 4 or 8 bytes.
template <typename Word>
__global__ void __launch_bounds__(kRankThreads) arrange_kernel(const __grid_constant__ ArrangeParams params) {
  const int32_t all = params.ranks * params.heads;
  const int64_t row_words = params.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t words = params.num_tokens * all * row_words;
  const int64_t thread = int64_t{blockIdx.x} * kRankThreads + threadIdx.x;
  if (blockIdx.x == 0 && params.sent.to != nullptr) write_header<kRankThreads>(params.sent);
  if (blockIdx.x == 0 && threadIdx.x < 32 && params.gathered.first != nullptr) compare_headers(params.gathered);
  for (int64_t at = thread; at < words; at += int64_t{gridDim.x} * kRankThreads) {
    const int64_t row = at / row_words;
    const auto head = static_cast<int32_t>(row % all);
    const HeadOwner owner = head_owner(head, params.ranks, params.heads, params.groups);
    const std::byte* const from = params.from + owner.rank * params.rank_stride + row / all * params.token_stride +
                                  owner.head * params.head_stride + at % row_words * static_cast<int64_t>(sizeof(Word));
    reinterpret_cast<Word*>(params.to)[at] = *reinterpret_cast<const Word*>(from);
  }
  if (params.slopes_to == nullptr || thread >= all) return;
  const auto head = static_cast<int32_t>(thread);
  const HeadOwner owner = head_owner(head, params.ranks, params.heads, params.groups);
  float slope = 0.0f;
  if (params.slopes != nullptr) {
    slope = reinterpret_cast<const float*>(params.slopes + owner.rank * params.slopes_rank_stride)[owner.head];
  }
  params.slopes_to[head] = slope;
}

/// Whether words of so many bytes can be moved.
bool fits(const ArrangeParams& params, int64_t bytes) {
  const auto from = static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.from));
  const auto to = static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.to));
  return (from | to | params.rank_stride | params.token_stride | params.head_stride | params.row_bytes) % bytes == 0;
}

/// A CTA takes a request.
__global__ void __launch_bounds__(kShiftThreads) shift_kernel(const __grid_constant__ ShiftLseParams params) {
  const auto request = static_cast<int32_t>(blockIdx.x);
  const double first_pos = params.first_pos[request];
  const int64_t end = int64_t{params.cu_q[request + 1]} * params.num_heads;
  for (int64_t i = int64_t{params.cu_q[request]} * params.num_heads + threadIdx.x; i < end; i += kShiftThreads) {
    const double slope = params.slopes[i % params.num_heads];
    params.lse[i] = static_cast<float>(params.lse[i] + slope * first_pos * std::numbers::log2e);
  }
}

/// Whether a token belongs to a request without keys, or to none. Requests are found by bisection.
template <typename Params>
__device__ bool is_empty_token(const Params& params, int64_t token) {
  if (params.query_start_loc == nullptr || token < params.query_start_loc[0]) return false;
  if (token >= params.query_start_loc[params.num_requests]) return true;
  int32_t low = 0;
  int32_t high = params.num_requests;  // query_start_loc[low] <= token < query_start_loc[high]
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (params.query_start_loc[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return params.local_seq_lens[low] == 0;
}

__global__ void __launch_bounds__(kRankThreads) clean_kernel(const __grid_constant__ CleanLseParams params) {
  const int64_t rows = params.num_tokens * params.num_heads;
  for (int64_t row = int64_t{blockIdx.x} * kRankThreads + threadIdx.x; row < rows;
       row += int64_t{gridDim.x} * kRankThreads) {
    const int64_t token = row / params.num_heads;
    const float lse = params.lse[token * params.token_stride + row % params.num_heads * params.head_stride];
    const bool empty = isinf(lse) || (params.nan_is_empty && isnan(lse)) || is_empty_token(params, token);
    params.cleaned[row] = empty ? -INFINITY : lse;
  }
}

__global__ void __launch_bounds__(kRankThreads) mask_kernel(const __grid_constant__ MaskRowsParams params) {
  const int64_t rows = params.num_tokens * params.num_heads;
  for (int64_t row = int64_t{blockIdx.x} * kRankThreads + threadIdx.x; row < rows;
       row += int64_t{gridDim.x} * kRankThreads) {
    const int64_t token = row / params.num_heads;
    if (!is_empty_token(params, token)) continue;
    params.lse[token * params.token_stride + row % params.num_heads * params.head_stride] = -INFINITY;
  }
}

/// A row of the send buffer, and where its values come from.
struct SendRow {
  int32_t part;
  int64_t token;
  int32_t local_head;
  int32_t head;
};
__device__ SendRow send_row(const RankHeads& heads, int64_t num_tokens, int64_t row) {
  SendRow result;
  result.local_head = static_cast<int32_t>(row % heads.local);
  result.token = row / heads.local % num_tokens;
  result.part = static_cast<int32_t>(row / heads.local / num_tokens);
  result.head = head_place({result.part, result.local_head}, heads.parts, heads.local, heads.groups);
  return result;
}

/// One row's LSE over all ranks and this rank's weight, in double, as the CPU's.
__device__ void weigh(const WeighParams& params, int64_t token, int32_t head, float& weight, double& lse) {
  const int64_t num_heads = int64_t{params.heads.parts} * params.heads.local;
  const int64_t all = params.num_tokens * num_heads;
  const float* const lses = params.gathered + token * num_heads + head;
  const double log_base = params.base == LseBase::k2 ? std::numbers::ln2 : 1.0;
  double top = -INFINITY;
  bool nan = false;
  for (int32_t r = 0; r < params.world; ++r) {
    const double other = lses[r * all];
    nan = nan || isnan(other);
    top = fmax(top, other);
  }
  const double own = lses[params.rank * all];
  if (nan) {
    weight = __int_as_float(0x7fc00000);
    lse = __longlong_as_double(0x7ff8000000000000);
    return;
  }
  weight = 0.0f;
  lse = top;
  if (isinf(top)) return;
  double sum = 0.0;
  for (int32_t r = 0; r < params.world; ++r) sum = __dadd_rn(sum, exp((lses[r * all] - top) * log_base));
  if (!isinf(own)) weight = static_cast<float>(exp((own - top) * log_base) / sum);
  lse = top * log_base + log(sum);
}

/// A warp takes rows_per_warp rows, 32 at most: each lane weighs one, and then all lanes move the rows, kElements
/// components a lane, of kInFlight rows at a time.
constexpr int32_t kInFlight = 4;

template <int32_t kBytes, int32_t kElements>
__global__ void __launch_bounds__(kRankThreads)
    weigh_kernel(const __grid_constant__ WeighParams params, int32_t rows_per_warp) {
  const int64_t rows = params.num_tokens * params.heads.parts * params.heads.local;
  const int32_t lane = threadIdx.x % 32;
  const int64_t step = int64_t{gridDim.x} * kWarps * rows_per_warp;
  for (int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * rows_per_warp; first < rows; first += step) {
    const auto count = static_cast<int32_t>(min(int64_t{rows_per_warp}, rows - first));
    float my_weight = 0.0f;
    int64_t my_from = 0;
    if (lane < count) {
      const SendRow at = send_row(params.heads, params.num_tokens, first + lane);
      double lse;
      weigh(params, at.token, at.head, my_weight, lse);
      if (at.part == params.own) {
        params.lse[at.token * params.heads.local + at.local_head] = static_cast<float>(lse);
      }
      my_from = at.token * params.token_stride + at.head * params.head_stride;
    }
    for (int32_t i = 0; i < count; i += kInFlight) {
      float weights[kInFlight];
      const std::byte* from[kInFlight];
#pragma unroll
      for (int32_t u = 0; u < kInFlight; ++u) {
        const int32_t row = min(i + u, count - 1);
        weights[u] = __shfl_sync(0xffffffffu, my_weight, row);
        from[u] = params.partial + __shfl_sync(0xffffffffu, my_from, row) * kBytes;
      }
      for (int32_t d = lane * kElements; d < params.head_dim; d += 32 * kElements) {
        Raw<kBytes, kElements> raw[kInFlight];
#pragma unroll
        for (int32_t u = 0; u < kInFlight; ++u) raw[u] = load_raw<kBytes, kElements>(from[u] + int64_t{d} * kBytes);
#pragma unroll
        for (int32_t u = 0; u < kInFlight; ++u) {
          if (i + u >= count) break;
          float values[kElements];
          decode(raw[u], params.dtype, values);
          // A weight of 0 gives 0, also for the NaN that an empty shard may have left.
#pragma unroll
          for (float& value : values) value = weights[u] == 0.0f ? 0.0f : __fmul_rn(value, weights[u]);
          store_floats<kElements>(reinterpret_cast<std::byte*>(params.send + (first + i + u) * params.head_dim + d),
                                  DType::kFloat32, values);
        }
      }
    }
  }
}

/// A warp takes rows as above. Words are elements, or pairs of 16-bit ones.
template <typename Word>
__global__ void __launch_bounds__(kRankThreads)
    pack_kernel(const __grid_constant__ PackParams params, int32_t rows_per_warp) {
  const int64_t num_heads = int64_t{params.heads.parts} * params.heads.local;
  const int64_t rows = params.num_tokens * num_heads;
  const int32_t lane = threadIdx.x % 32;
  const int32_t bytes = size_of(params.dtype);
  const int32_t words = params.head_dim * bytes / static_cast<int32_t>(sizeof(Word));
  const int64_t row_bytes = params.row_elements * bytes;
  const int64_t step = int64_t{gridDim.x} * kWarps * rows_per_warp;
  for (int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * rows_per_warp; first < rows; first += step) {
    const auto count = static_cast<int32_t>(min(int64_t{rows_per_warp}, rows - first));
    int64_t my_from = 0;
    if (lane < count) {
      const SendRow at = send_row(params.heads, params.num_tokens, first + lane);
      my_from = (at.token * params.token_stride + at.head * params.head_stride) * bytes;
      *reinterpret_cast<float*>(params.send + (first + lane) * row_bytes + params.lse_at * bytes) =
          params.cleaned[at.token * num_heads + at.head];
    }
    for (int32_t i = 0; i < count; i += kInFlight) {
      const Word* from[kInFlight];
#pragma unroll
      for (int32_t u = 0; u < kInFlight; ++u) {
        from[u] =
            reinterpret_cast<const Word*>(params.partial + __shfl_sync(0xffffffffu, my_from, min(i + u, count - 1)));
      }
      for (int32_t d = lane; d < words; d += 32) {
        Word loaded[kInFlight];
#pragma unroll
        for (int32_t u = 0; u < kInFlight; ++u) loaded[u] = from[u][d];
#pragma unroll
        for (int32_t u = 0; u < kInFlight; ++u) {
          if (i + u < count) reinterpret_cast<Word*>(params.send + (first + i + u) * row_bytes)[d] = loaded[u];
        }
      }
    }
  }
}

__device__ inline float add(float a, float b) {
  return __fadd_rn(a, b);
}
__device__ inline float4 add(const float4& a, const float4& b) {
  return make_float4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
}

/// Word: a float or four.
template <typename Word>
__global__ void __launch_bounds__(kRankThreads) sum_kernel(const __grid_constant__ SumParams params) {
  const int64_t words = params.count / static_cast<int64_t>(sizeof(Word) / sizeof(float));
  for (int64_t i = int64_t{blockIdx.x} * kRankThreads + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * kRankThreads) {
    Word sum = reinterpret_cast<const Word*>(params.sent[0])[i];
#pragma unroll 4
    for (int32_t r = 1; r < params.world; ++r) sum = add(sum, reinterpret_cast<const Word*>(params.sent[r])[i]);
    reinterpret_cast<Word*>(params.out)[i] = sum;
  }
}

/// Rows of a warp: 32 where that leaves work for every SM.
int32_t rows_of_warp(int64_t rows) {
  constexpr int64_t kManyWarps = 132 * kWarps * 4;
  return static_cast<int32_t>(std::clamp<int64_t>(rows / kManyWarps, 1, 32));
}

/// Whether rows of so many elements begin where `bytes` of them can be read at once.
bool begins_at(const std::byte* data, int64_t strides, int64_t element, uint32_t bytes) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(strides * element)) % bytes == 0;
}

}  // namespace

void enqueue(const ArrangeParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  auto* kernel = arrange_kernel<uint8_t>;
  int64_t word = 1;
  if (fits(params, 8)) {
    kernel = arrange_kernel<uint64_t>, word = 8;
  } else if (fits(params, 4)) {
    kernel = arrange_kernel<uint32_t>, word = 4;
  } else if (fits(params, 2)) {
    kernel = arrange_kernel<uint16_t>, word = 2;
  }
  const int64_t all = int64_t{params.ranks} * params.heads;
  // Enough threads for the slopes, too: rows are of a word at least.
  const int64_t words = params.num_tokens * all * (params.row_bytes / word);
  kernel<<<grid_for(words, kRankThreads), kRankThreads, 0, native(stream)>>>(params);
  check_launch("the arranging of queries");
}

void enqueue(const ShiftLseParams& params, Stream stream) {
  if (params.num_requests == 0) return;
  shift_kernel<<<static_cast<uint32_t>(params.num_requests), kShiftThreads, 0, native(stream)>>>(params);
  check_launch("the shift of LSEs");
}

void enqueue(const CleanLseParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  clean_kernel<<<grid_for(params.num_tokens * params.num_heads, kRankThreads), kRankThreads, 0, native(stream)>>>(
      params);
  check_launch("the cleaning of LSEs");
}

void enqueue(const MaskRowsParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  mask_kernel<<<grid_for(params.num_tokens * params.num_heads, kRankThreads), kRankThreads, 0, native(stream)>>>(
      params);
  check_launch("the masking of LSEs");
}

void enqueue(const WeighParams& params, Stream stream) {
  const int64_t rows = params.num_tokens * params.heads.parts * params.heads.local;
  if (rows == 0) return;
  const int32_t bytes = size_of(params.dtype);
  const int64_t strides = params.token_stride | params.head_stride | params.head_dim;
  const bool wide = begins_at(params.partial, strides, bytes, static_cast<uint32_t>(4 * bytes)) &&
                    reinterpret_cast<uintptr_t>(params.send) % 16 == 0;
  auto* const of_two = wide ? weigh_kernel<2, 4> : weigh_kernel<2, 1>;
  auto* const of_four = wide ? weigh_kernel<4, 4> : weigh_kernel<4, 1>;
  auto* const kernel = bytes == 2 ? of_two : of_four;
  const int32_t per_warp = rows_of_warp(rows);
  kernel<<<grid_for(rows, int64_t{kWarps} * per_warp), kRankThreads, 0, native(stream)>>>(params, per_warp);
  check_launch("the weighing of partial results");
}

void enqueue(const PackParams& params, Stream stream) {
  const int64_t rows = params.num_tokens * params.heads.parts * params.heads.local;
  if (rows == 0) return;
  const int32_t bytes = size_of(params.dtype);
  const int64_t strides = params.token_stride | params.head_stride | params.head_dim | params.row_elements;
  const bool words = begins_at(params.partial, strides, bytes, 4) && begins_at(params.send, 0, bytes, 4);
  auto* const kernel = words ? pack_kernel<uint32_t> : pack_kernel<uint16_t>;
  const int32_t per_warp = rows_of_warp(rows);
  kernel<<<grid_for(rows, int64_t{kWarps} * per_warp), kRankThreads, 0, native(stream)>>>(params, per_warp);
  check_launch("the packing of partial results");
}

void enqueue(const SumParams& params, Stream stream) {
  if (params.count == 0) return;
  uintptr_t all = reinterpret_cast<uintptr_t>(params.out) | static_cast<uintptr_t>(params.count * 4);
  for (int32_t r = 0; r < params.world; ++r) all |= reinterpret_cast<uintptr_t>(params.sent[r]);
  const bool wide = all % 16 == 0;
  auto* const kernel = wide ? sum_kernel<float4> : sum_kernel<float>;
  kernel<<<grid_for(params.count, wide ? 4 * kRankThreads : kRankThreads), kRankThreads, 0, native(stream)>>>(params);
  check_launch("a sum over ranks");
}

}  // namespace folio::inline v0::kernels::cuda
