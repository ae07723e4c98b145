#include <climits>

#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tables/tables.cuh"
#include "kernels/cuda/common/tables/tables.hpp"
#include "ptx/control.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kLengthThreads = 256;
constexpr int32_t kSumThreads = 512;

/// One CTA. A thread adds up kPerThread neighbours, but reads and writes every kSumThreads-th: whole sectors.
template <int32_t kPerThread>
__global__ void __launch_bounds__(kSumThreads) indptr_kernel(const __grid_constant__ IndptrParams params) {
  constexpr int32_t kAtOnce = kSumThreads * kPerThread;
  __shared__ int64_t sums[kSumThreads / 32 + 1];
  __shared__ int32_t stage[kAtOnce];
  ptx::griddep_launch_dependents();  // a list of the same rows looks them up meanwhile
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) params.indptr[0] = 0;
  int64_t before = 0;
  for (int64_t first = thread; first - thread < params.n; first += kAtOnce) {
    int32_t lengths[kPerThread];
#pragma unroll
    for (int32_t k = 0; k < kPerThread; ++k) {
      const int64_t i = first + k * kSumThreads;
      lengths[k] = i < params.n ? params.lens[i] : 0;
    }
    __syncthreads();  // what was staged before has been stored
#pragma unroll
    for (int32_t k = 0; k < kPerThread; ++k) {
      const int64_t i = first + k * kSumThreads;
      if (lengths[k] < 0) report(params.status);
      const int32_t length = max(0, lengths[k]);
      const int32_t units = length == 0 ? 0 : static_cast<int32_t>(params.units.quotient(length - 1)) + 1;
      stage[k * kSumThreads + thread] = units;
      if (params.last_unit_len == nullptr || i >= params.n) continue;
      params.last_unit_len[i] = units == 0 ? 0 : length - (units - 1) * params.unit;
    }
    __syncthreads();
    int32_t units[kPerThread];
    int64_t mine = 0;
#pragma unroll
    for (int32_t k = 0; k < kPerThread; ++k) mine += units[k] = stage[thread * kPerThread + k];
    const BlockSum<kSumThreads> sum(mine, sums);
    int64_t to = before + sum.to - mine;
#pragma unroll
    for (int32_t k = 0; k < kPerThread; ++k) {
      to += units[k];
      stage[thread * kPerThread + k] = static_cast<int32_t>(min(to, int64_t{INT_MAX}));
    }
    if (to > INT_MAX) report(params.status);
    before += sum.all;
    __syncthreads();
#pragma unroll
    for (int32_t k = 0; k < kPerThread; ++k) {
      const int64_t i = first + k * kSumThreads;
      if (i < params.n) params.indptr[i + 1] = stage[k * kSumThreads + thread];
    }
  }
}

__global__ void __launch_bounds__(kLengthThreads) lens_kernel(const __grid_constant__ LensParams params) {
  for (int64_t i = int64_t{blockIdx.x} * kLengthThreads + threadIdx.x; i < params.n;
       i += int64_t{gridDim.x} * kLengthThreads) {
    const int64_t units = int64_t{params.indptr[i + 1]} - params.indptr[i];
    const int32_t last = params.last_unit_len[i];
    const bool fits = params.indptr[i] >= 0 && units >= 0 && last >= (units == 0 ? 0 : 1) && last <= params.unit;
    const int64_t length = fits && units > 0 ? (units - 1) * params.unit + last : 0;
    if (!fits || length > INT_MAX) report(params.status);
    params.lens[i] = length > INT_MAX ? 0 : static_cast<int32_t>(length);
  }
}

}  // namespace

void enqueue(const IndptrParams& given, Stream stream) {
  IndptrParams params = given;
  params.units = FastDiv(params.unit);
  auto* const several = params.n <= 4 * kSumThreads ? indptr_kernel<4> : indptr_kernel<8>;
  auto* const kernel = params.n <= kSumThreads ? indptr_kernel<1> : several;
  kernel<<<1, kSumThreads, 0, native(stream)>>>(params);
  check_launch("a list's beginnings");
}

void enqueue(const LensParams& params, Stream stream) {
  if (params.n == 0) return;
  lens_kernel<<<grid_for(params.n, kLengthThreads), kLengthThreads, 0, native(stream)>>>(params);
  check_launch("lengths from pages");
}

}  // namespace folio::inline v0::kernels::cuda
