#pragma once

#include <cstddef>
#include <cstdint>

namespace folio::inline v0::planner::cuda {

/// A thread block as the group that runs the device planner. One dimension, whole warps.
class ThreadBlock {
 public:
  static constexpr int32_t kMaxWarps = 32;
  static constexpr size_t kSlotBytes = 32;  ///< the largest type that is scanned

  /// What scans need of shared memory: two sets, so that one scan need not wait for the readers of the one before.
  struct Shared {
    alignas(16) std::byte slots[2][kMaxWarps][kSlotBytes];
  };

  __device__ explicit ThreadBlock(Shared& shared) : shared_(shared) {}
  __device__ int32_t rank() const { return static_cast<int32_t>(threadIdx.x); }
  __device__ int32_t size() const { return static_cast<int32_t>(blockDim.x); }
  __device__ void sync() { __syncthreads(); }

  /// What the values of all lower ranks combine to; `total`: of all ranks. A barrier, too.
  template <typename T, typename Combine>
  __device__ T exclusive_scan(const T& value, const T& identity, const Combine& combine, T& total) {
    static_assert(sizeof(T) <= kSlotBytes && sizeof(T) % sizeof(uint32_t) == 0);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t num_warps = blockDim.x / 32;
    auto& slots = shared_.slots[parity_];
    parity_ ^= 1;
    const T inclusive = scan_warp(value, combine, lane);
    if (lane == 31) *reinterpret_cast<T*>(slots[warp]) = inclusive;
    __syncthreads();
    if (warp == 0) {
      const T of_warp = lane < num_warps ? *reinterpret_cast<const T*>(slots[lane]) : identity;
      const T up_to_warp = scan_warp(of_warp, combine, lane);
      if (lane < num_warps) *reinterpret_cast<T*>(slots[lane]) = up_to_warp;
    }
    __syncthreads();
    total = *reinterpret_cast<const T*>(slots[num_warps - 1]);
    const T of_lower_lanes = shuffle_up(inclusive, 1);
    const T in_warp = lane == 0 ? identity : of_lower_lanes;
    return warp == 0 ? in_warp : combine(*reinterpret_cast<const T*>(slots[warp - 1]), in_warp);
  }

 private:
  template <typename T>
  static __device__ T shuffle_up(const T& value, uint32_t distance) {
    constexpr size_t kWords = sizeof(T) / sizeof(uint32_t);
    T moved;
    uint32_t words[kWords];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (size_t i = 0; i < kWords; ++i) words[i] = __shfl_up_sync(0xffffffffu, words[i], distance);
    memcpy(&moved, words, sizeof(T));
    return moved;
  }

  template <typename T, typename Combine>
  static __device__ T scan_warp(T value, const Combine& combine, uint32_t lane) {
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const T lower = shuffle_up(value, distance);
      if (lane >= distance) value = combine(lower, value);
    }
    return value;
  }

  Shared& shared_;
  int parity_ = 0;
};

}  // namespace folio::inline v0::planner::cuda
