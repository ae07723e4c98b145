#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/table_checks_test_util.hpp"
#include "folio/folio.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

namespace folio::cuda_test {

/// An array in device memory.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) { check(cudaMalloc(&data_, bytes())); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { set(values); }
  ~DeviceArray() { static_cast<void>(cudaFree(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  size_t bytes() const { return size_ * sizeof(T); }
  /// Both are there on return: the tests' streams do not wait for the default one, on which copies from pageable memory
  /// and fills may still be under way.
  void set(const std::vector<T>& values) {
    check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
    check(cudaStreamSynchronize(nullptr));
  }
  void fill(int byte) {
    check(cudaMemset(data_, byte, bytes()));
    check(cudaStreamSynchronize(nullptr));
  }
  std::vector<T> get() const {
    std::vector<T> values(size_);
    check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

/// How often a test repeats its steps: an emulated GPU takes too long for all.
inline int repeats(int on_gpu) {
#if defined(FOLIO_EMULATED_CUDA)
  return on_gpu / 25;
#else
  return on_gpu;
#endif
}

/// Skips where there is no GPU, and says so.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }
};

}  // namespace folio::cuda_test
