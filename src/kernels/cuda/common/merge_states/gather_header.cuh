#pragma once

#include "kernels/cuda/common/merge_states/gather_header.hpp"

namespace folio::inline v0::kernels::cuda {

/// The sum of all threads' values, for thread 0. Every thread of the CTA calls.
template <int32_t kThreads>
__device__ uint64_t sum_of_cta(uint64_t value) {
  constexpr int32_t kWarps = kThreads / 32;
  __shared__ uint64_t sums[kWarps];
  for (int32_t distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  uint64_t sum = 0;
  for (int32_t warp = 0; warp < kWarps; ++warp) sum += sums[warp];
  return sum;
}

/// The header to send, for thread 0. Every thread of one CTA calls.
template <int32_t kThreads>
__device__ GatherHeader make_header(const SentHeader& sent) {
  GatherHeader header = sent.header;
  const QScales& scales = sent.q_scales;
  if (scales.data != nullptr) {
    uint64_t sum = 0;
    for (int64_t i = threadIdx.x; i < scales.count(); i += kThreads) sum += scales.term(i);
    header.q_scales = scales.begin() + sum_of_cta<kThreads>(sum);
    header.q_scale = scales.data[0];
  }
  return header;
}

/// Every thread of one CTA calls.
template <int32_t kThreads>
__device__ void write_header(const SentHeader& sent) {
  const GatherHeader header = make_header<kThreads>(sent);
  if (threadIdx.x == 0) *sent.to = header;
}

/// One warp calls.
__device__ inline void compare_headers(const GatheredHeaders& gathered) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const auto header_of = [&gathered](int32_t rank) {
    return *reinterpret_cast<const GatherHeader*>(gathered.first + rank * gathered.stride);
  };
  const GatherHeader mine = header_of(gathered.rank);
  for (int32_t first = 0; first < gathered.world; first += 32) {
    const int32_t rank = first + lane;
    const bool differs = rank < gathered.world && !same(header_of(rank), mine);
    const uint32_t differing = __ballot_sync(0xffffffffu, differs);
    if (differing == 0) continue;
    const int32_t lowest = __ffs(static_cast<int32_t>(differing)) - 1;
    if (lane != lowest) return;
    HeaderFault& out = *gathered.fault;
    volatile int32_t& reported = out.rank;
    if (reported >= 0) return;
    out.theirs = header_of(rank);
    out.mine = mine;
    __threadfence_system();  // the host sees the rank only once the rest is there
    reported = rank;
    return;
  }
}

}  // namespace folio::inline v0::kernels::cuda
