#include "kernels/cuda/common/combine/ranks.hpp"

#include "kernels/cuda/common/elements.cuh"
#include "kernels/cuda/common/launch.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr double kLn2 = 0.693147180559945309417;

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

__global__ void __launch_bounds__(kThreads) clean_kernel(const __grid_constant__ CleanLseParams params) {
  const int64_t rows = params.num_tokens * params.num_heads;
  for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows; row += int64_t{gridDim.x} * kThreads) {
    const int64_t token = row / params.num_heads;
    const float lse = params.lse[token * params.token_stride + row % params.num_heads * params.head_stride];
    const bool empty = isinf(lse) || (params.nan_is_empty && isnan(lse)) || is_empty_token(params, token);
    params.cleaned[row] = empty ? -INFINITY : lse;
  }
}

__global__ void __launch_bounds__(kThreads) mask_kernel(const __grid_constant__ MaskRowsParams params) {
  const int64_t rows = params.num_tokens * params.num_heads;
  for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows; row += int64_t{gridDim.x} * kThreads) {
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
  const int32_t per_group = heads.local / heads.groups;
  const int32_t h = result.local_head;
  result.head = h / per_group * per_group * heads.parts + result.part * per_group + h % per_group;
  return result;
}

/// One row's LSE over all ranks and this rank's weight, in double, as the CPU's.
__device__ void weigh(const WeighParams& params, int64_t token, int32_t head, float& weight, double& lse) {
  const int64_t num_heads = int64_t{params.heads.parts} * params.heads.local;
  const int64_t all = params.num_tokens * num_heads;
  const float* const lses = params.gathered + token * num_heads + head;
  const double log_base = params.base == LseBase::k2 ? kLn2 : 1.0;
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

/// A warp a row.
__global__ void __launch_bounds__(kThreads) weigh_kernel(const __grid_constant__ WeighParams params) {
  const int64_t rows = params.num_tokens * params.heads.parts * params.heads.local;
  const int32_t lane = threadIdx.x % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const SendRow at = send_row(params.heads, params.num_tokens, row);
    float weight;
    double lse;
    weigh(params, at.token, at.head, weight, lse);
    if (lane == 0 && at.part == params.own) {
      params.lse[at.token * params.heads.local + at.local_head] = static_cast<float>(lse);
    }
    const int64_t from = at.token * params.token_stride + at.head * params.head_stride;
    for (int32_t d = lane; d < params.head_dim; d += 32) {
      float value;
      load_floats<1>(element_at(params.partial, params.dtype, from + d), params.dtype, &value);
      // A weight of 0 gives 0, also for the NaN that an empty shard may have left.
      params.send[row * params.head_dim + d] = weight == 0.0f ? 0.0f : __fmul_rn(value, weight);
    }
  }
}

/// A warp a row. Words are elements: of 2 or 4 bytes.
template <typename Word>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams params) {
  const int64_t num_heads = int64_t{params.heads.parts} * params.heads.local;
  const int64_t rows = params.num_tokens * num_heads;
  const int32_t lane = threadIdx.x % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const SendRow at = send_row(params.heads, params.num_tokens, row);
    const auto* const from =
        reinterpret_cast<const Word*>(params.partial) + at.token * params.token_stride + at.head * params.head_stride;
    auto* const to = reinterpret_cast<Word*>(params.send) + row * params.row_elements;
    for (int32_t d = lane; d < params.head_dim; d += 32) to[d] = from[d];
    if (lane == 0) *reinterpret_cast<float*>(to + params.lse_at) = params.cleaned[at.token * num_heads + at.head];
  }
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumParams params) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < params.count; i += int64_t{gridDim.x} * kThreads) {
    float sum = params.sent[0][i];
    for (int32_t r = 1; r < params.world; ++r) sum = __fadd_rn(sum, params.sent[r][i]);
    params.out[i] = sum;
  }
}

}  // namespace

void enqueue(const CleanLseParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  clean_kernel<<<grid_for(params.num_tokens * params.num_heads, kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("the cleaning of LSEs");
}

void enqueue(const MaskRowsParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  mask_kernel<<<grid_for(params.num_tokens * params.num_heads, kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("the masking of LSEs");
}

void enqueue(const WeighParams& params, Stream stream) {
  const int64_t rows = params.num_tokens * params.heads.parts * params.heads.local;
  if (rows == 0) return;
  weigh_kernel<<<grid_for(rows, kWarps), kThreads, 0, native(stream)>>>(params);
  check_launch("the weighing of partial results");
}

void enqueue(const PackParams& params, Stream stream) {
  const int64_t rows = params.num_tokens * params.heads.parts * params.heads.local;
  if (rows == 0) return;
  auto* const kernel = size_of(params.dtype) == 2 ? pack_kernel<uint16_t> : pack_kernel<uint32_t>;
  kernel<<<grid_for(rows, kWarps), kThreads, 0, native(stream)>>>(params);
  check_launch("the packing of partial results");
}

void enqueue(const SumParams& params, Stream stream) {
  if (params.count == 0) return;
  sum_kernel<<<grid_for(params.count, kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("a sum over ranks");
}

}  // namespace folio::inline v0::kernels::cuda
