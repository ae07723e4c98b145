#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <vector>

/// What the GPU benchmarks share: checked calls, device memory, times of what a stream runs.
namespace folio::bench {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes, int fill = 0) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes));
    check(cudaMemset(data_, fill, bytes));
    check(cudaStreamSynchronize(nullptr));  // streams that do not wait for the default one write here next
  }
  template <typename T>
  explicit DeviceBytes(const std::vector<T>& values) : DeviceBytes(values.size() * sizeof(T)) {
    check(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice));
    check(cudaStreamSynchronize(nullptr));
  }
  ~DeviceBytes() { static_cast<void>(cudaFree(data_)); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  template <typename T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  template <typename T>
  std::span<T> span(int64_t count) const {
    return {static_cast<T*>(data_), static_cast<size_t>(count)};
  }
  size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

/// Microseconds on the GPU of each of `rounds` rounds of what `enqueue` enqueues, after `warm_up` others. What `before`
/// enqueues is not counted: where it lasts longer than enqueuing does, what is counted never waits for the host.
inline std::vector<double> round_times(cudaStream_t stream, int32_t warm_up, int32_t rounds,
                                       const std::function<void()>& enqueue, const std::function<void()>& before = {}) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<double> times;
  for (int32_t i = 0; i < warm_up + rounds; ++i) {
    if (before) before();
    check(cudaEventRecord(begin, stream));
    enqueue();
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= warm_up) times.push_back(1000.0 * static_cast<double>(milliseconds));
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  return times;
}

/// Median microseconds of a replay of a graph of `calls` calls, for one call.
inline double graph_time(cudaStream_t stream, int32_t calls, int32_t rounds, const std::function<void()>& call) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int32_t i = 0; i < calls; ++i) call();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<double> times = round_times(stream, 4, rounds, [&] { check(cudaGraphLaunch(replay, stream)); });
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] / calls;
}

}  // namespace folio::bench
