#pragma once

#include <cstddef>
#include <cstdint>

namespace folio::inline v0::planner::cuda {

/// A warp as the group that plans few requests: what they are told of each other goes through registers, and nobody
/// waits for another warp. What ThreadBlock offers, but for general scans.
class Warp {
 public:
  static constexpr int32_t kMostSums = 5;

  /// `sums`: shared memory of this warp alone.
  __device__ explicit Warp(int32_t (&sums)[kMostSums]) : sums_(sums) {}
  __device__ int32_t rank() const { return static_cast<int32_t>(threadIdx.x) % 32; }
  __device__ int32_t size() const { return 32; }
  __device__ void sync() { __syncwarp(); }
  __device__ bool all_of(bool mine) { return __all_sync(kAll, mine ? 1 : 0) != 0; }

  /// Lanes take whichever of the i and j there are.
  template <size_t N, typename Of>
  __device__ void sum_each(int32_t (&values)[N], int32_t count, const Of& of) {
    static_assert(N <= kMostSums);
    if (rank() < kMostSums) sums_[rank()] = 0;
    __syncwarp();
    constexpr auto kEach = static_cast<int32_t>(N);
#pragma unroll 1
    for (int32_t place = rank(); place < kEach * count; place += 32) {
      const int32_t i = place % kEach;
      atomicAdd(&sums_[i], of(i)(place / kEach));
    }
    __syncwarp();
#pragma unroll
    for (size_t i = 0; i < N; ++i) values[i] = sums_[i];
  }

  template <size_t N>
  __device__ void sum_before(int32_t (&values)[N], int32_t (&total)[N]) {
    int32_t up_to[N];
#pragma unroll
    for (size_t i = 0; i < N; ++i) up_to[i] = values[i];
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
#pragma unroll
      for (size_t i = 0; i < N; ++i) {
        const int32_t lower = __shfl_up_sync(kAll, up_to[i], static_cast<uint32_t>(distance));
        if (rank() >= distance) up_to[i] += lower;
      }
    }
#pragma unroll
    for (size_t i = 0; i < N; ++i) {
      total[i] = __shfl_sync(kAll, up_to[i], 31);
      values[i] = up_to[i] - values[i];
    }
  }

 private:
  static constexpr uint32_t kAll = 0xffffffffu;

  int32_t (&sums_)[kMostSums];
};

}  // namespace folio::inline v0::planner::cuda
