#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "folio/folio.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

namespace folio::distributed::testing {

/// Memory of the device, full of NaN, that holds what a case has of one kind.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    cuda_test::check(cudaMalloc(&data_, std::max<size_t>(bytes, 256)));
    cuda_test::check(cudaMemset(data_, 0xff, std::max<size_t>(bytes, 256)));  // NaN
    cuda_test::check(cudaStreamSynchronize(nullptr));
  }
  ~DeviceMemory() { static_cast<void>(cudaFree(data_)); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  /// There on return.
  void set(const void* from, size_t bytes) {
    if (bytes > bytes_) throw std::runtime_error("the memory is too small");
    if (bytes == 0) return;
    cuda_test::check(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice));
    cuda_test::check(cudaStreamSynchronize(nullptr));
  }
  template <typename T>
  void set(const std::vector<T>& values) {
    set(values.data(), values.size() * sizeof(T));
  }
  void get(void* to, size_t bytes) const { cuda_test::check(cudaMemcpy(to, data_, bytes, cudaMemcpyDeviceToHost)); }
  Workspace workspace() const { return {data_, bytes_}; }

 private:
  size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace folio::distributed::testing
