#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <vector>

#include "backend_step.hpp"

namespace folio::backends::testing {

/// A step's arrays in a GPU's memory, each of them copied there and, by finish, back.
class DeviceHome : public Home {
 public:
  ~DeviceHome() override {
    for (const Array& array : arrays_) static_cast<void>(cudaFree(array.device));
  }
  Where where() const override { return Where::kDevice; }
  using Home::move_in;
  void* move_in(void* data, size_t bytes) override {
    if (bytes == 0) return data;
    Array array{data, nullptr, bytes};
    check(cudaMalloc(&array.device, bytes));
    arrays_.push_back(array);
    check(cudaMemcpy(array.device, data, bytes, cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());
    return array.device;
  }
  /// What nothing has written comes back as it was.
  void finish() override {
    check(cudaDeviceSynchronize());
    for (const Array& array : arrays_) check(cudaMemcpy(array.host, array.device, array.bytes, cudaMemcpyDeviceToHost));
  }

 protected:
  static void check(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
  }

 private:
  struct Array {
    void* host;
    void* device;
    size_t bytes;
  };
  std::vector<Array> arrays_;
};

}  // namespace folio::backends::testing
