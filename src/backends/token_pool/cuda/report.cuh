#pragma once

#include <cstdint>

#include "backends/token_pool/device/list_report.hpp"

/// What the kernels of lists share.
namespace folio::inline v0::backends::token_pool::gpu {

/// The first thread to find a fault writes it; the host reads `fault` before the rest.
__device__ inline void report_to(ListReport* to, const ListReport& found) {
  if (to == nullptr || atomicCAS(&to->claimed, 0, 1) != 0) return;
  to->request = found.request;
  to->row = found.row;
  to->value = found.value;
  to->bound = found.bound;
  __threadfence_system();
  *const_cast<volatile KvRangeFault*>(&to->fault) = found.fault;
}

/// The sums of `value` over the threads up to and including this one (Hillis and Steele). `shared`: a value a thread.
__device__ inline int64_t inclusive_sum(int64_t value, int64_t* shared) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto threads = static_cast<int32_t>(blockDim.x);
  shared[thread] = value;
  __syncthreads();
  for (int32_t distance = 1; distance < threads; distance *= 2) {
    const int64_t before = thread >= distance ? shared[thread - distance] : 0;
    __syncthreads();
    shared[thread] += before;
    __syncthreads();
  }
  return shared[thread];
}

/// value_of(0) + ... + value_of(count - 1), for every thread.
template <typename ValueOf>
__device__ int64_t sum_of(int32_t count, int64_t* shared, ValueOf&& value_of) {
  int64_t own = 0;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < count; i += static_cast<int32_t>(blockDim.x)) own += value_of(i);
  inclusive_sum(own, shared);
  const int64_t sum = shared[blockDim.x - 1];
  __syncthreads();
  return sum;
}

}  // namespace folio::inline v0::backends::token_pool::gpu
