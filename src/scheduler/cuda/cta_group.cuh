#pragma once

#include <cstddef>
#include <cstdint>

namespace folio::inline v0::scheduler::cuda {

/// A CTA as the group that runs the device scheduler. It has one dimension and whole warps.
class CtaGroup {
 public:
  static constexpr int32_t kMaxWarps = 32;
  static constexpr size_t kSlotBytes = 32;  ///< the largest type that is scanned
  static constexpr size_t kMaxSums = 5;

  /// Shared memory of scans: two sets, so that a scan need not wait for the readers of the previous one.
  struct Shared {
    alignas(16) std::byte slots[2][kMaxWarps][kSlotBytes];
    int32_t sums[2][kMaxSums][kMaxWarps];
  };

  __device__ explicit CtaGroup(Shared& shared) : shared_(shared) {}
  __device__ int32_t rank() const { return static_cast<int32_t>(threadIdx.x); }
  __device__ int32_t size() const { return static_cast<int32_t>(blockDim.x); }
  __device__ void sync() { __syncthreads(); }

  /// Combines the values of all lower ranks; `total`: of all ranks. Also a barrier.
  template <typename T, typename Combine>
  __device__ T exclusive_scan(const T& value, const T& identity, const Combine& combine, T& total) {
    static_assert(sizeof(T) <= kSlotBytes && sizeof(T) % sizeof(uint32_t) == 0);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t num_warps = blockDim.x / 32;
    auto& slots = shared_.slots[parity_];
    parity_ ^= 1;
    const T inclusive = scan_warp(value, combine, lane, 32);
    if (lane == 31) *reinterpret_cast<T*>(slots[warp]) = inclusive;
    __syncthreads();
    // Every warp repeats this: a second barrier would take longer.
    const T of_warp = lane < num_warps ? *reinterpret_cast<const T*>(slots[lane]) : identity;
    const T up_to_warp = scan_warp(of_warp, combine, lane, num_warps);
    total = shuffle(up_to_warp, num_warps - 1);
    const T lower_warps = shuffle(up_to_warp, warp == 0 ? 0 : warp - 1);
    const T lower_lanes = shuffle(inclusive, lane == 0 ? 0 : lane - 1);
    if (warp == 0) return lane == 0 ? identity : lower_lanes;
    return lane == 0 ? lower_warps : combine(lower_warps, lower_lanes);
  }

  /// Also a barrier, as are sum_each and sum_before.
  __device__ bool all_of(bool mine) { return __syncthreads_and(mine ? 1 : 0) != 0; }

  /// values[i] = the sum of of(i)(j) for j in [0, count). One warp per i.
  template <size_t N, typename Of>
  __device__ void sum_each(int32_t (&values)[N], int32_t count, const Of& of) {
    static_assert(N <= kMaxSums);
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    auto& sums = next_sums();
#pragma unroll 1
    for (uint32_t i = threadIdx.x / 32; i < N; i += blockDim.x / 32) {
      const auto of_i = of(static_cast<int32_t>(i));
      int32_t sum = 0;
#pragma unroll 1
      for (int32_t j = lane; j < count; j += 32) sum += of_i(j);
      sum = __reduce_add_sync(0xffffffffu, sum);
      if (lane == 0) sums[i][0] = sum;
    }
    __syncthreads();
#pragma unroll
    for (size_t i = 0; i < N; ++i) values[i] = sums[i][0];
  }

  /// Replaces every value by the sum of the lower ranks' values; `total`: of all ranks.
  template <size_t N>
  __device__ void sum_before(int32_t (&values)[N], int32_t (&total)[N]) {
    static_assert(N <= kMaxSums);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    auto& sums = next_sums();
    int32_t up_to[N];
#pragma unroll
    for (size_t i = 0; i < N; ++i) up_to[i] = values[i];
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
#pragma unroll
      for (size_t i = 0; i < N; ++i) {
        const int32_t lower = __shfl_up_sync(0xffffffffu, up_to[i], distance);
        if (lane >= distance) up_to[i] += lower;
      }
    }
#pragma unroll
    for (size_t i = 0; i < N; ++i) {
      if (lane == 31) sums[i][warp] = up_to[i];
    }
    __syncthreads();
#pragma unroll
    for (size_t i = 0; i < N; ++i) {
      const int32_t of_warp = lane < blockDim.x / 32 ? sums[i][lane] : 0;
      total[i] = __reduce_add_sync(0xffffffffu, of_warp);
      values[i] = up_to[i] - values[i] + __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
    }
  }

 private:
  __device__ int32_t (&next_sums())[kMaxSums][kMaxWarps] {
    parity_ ^= 1;
    return shared_.sums[parity_];
  }

  /// The value of lane `from`.
  template <typename T>
  static __device__ T shuffle(const T& value, uint32_t from) {
    constexpr size_t kWords = sizeof(T) / sizeof(uint32_t);
    T moved;
    uint32_t words[kWords];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (size_t i = 0; i < kWords; ++i) words[i] = __shfl_sync(0xffffffffu, words[i], from);
    memcpy(&moved, words, sizeof(T));
    return moved;
  }

  /// Inclusive scan over the lanes below `count`. Not unrolled: fetching the code would cost more than it saves.
  template <typename T, typename Combine>
  static __device__ T scan_warp(T value, const Combine& combine, uint32_t lane, uint32_t count) {
#pragma unroll 1
    for (uint32_t distance = 1; distance < count; distance *= 2) {
      const T lower = shuffle(value, lane >= distance ? lane - distance : lane);
      if (lane >= distance) value = combine(lower, value);
    }
    return value;
  }

  Shared& shared_;
  int parity_ = 0;
};

}  // namespace folio::inline v0::scheduler::cuda
