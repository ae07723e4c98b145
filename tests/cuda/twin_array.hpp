#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "device_array.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::cuda_test {

/// An array on the host and the same on a GPU.
template <typename T>
class Twin {
 public:
  explicit Twin(std::vector<T> values)
      : host(std::move(values)), gpu_(std::make_unique<DeviceArray<T>>(std::max<size_t>(host.size(), 1))) {
    check(cudaMemcpy(gpu_->data(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    check(cudaStreamSynchronize(nullptr));  // from pageable memory the copy may still be under way
  }
  T* at(bool on_gpu) { return on_gpu ? gpu_->data() : host.data(); }
  std::span<T> span(bool on_gpu) { return {at(on_gpu), host.size()}; }
  std::vector<T> gpu() const {
    std::vector<T> values(host.size());
    check(cudaMemcpy(values.data(), gpu_->data(), values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  bool equal() const { return gpu() == host; }

  std::vector<T> host;

 private:
  std::unique_ptr<DeviceArray<T>> gpu_;
};

using Bytes = Twin<std::byte>;

/// `count` elements around 0, none of them NaN; `deviation` decides how many saturate.
inline std::vector<std::byte> random_elements(DType dtype, int64_t count, std::mt19937& random,
                                              float deviation = 20.0f) {
  std::vector<std::byte> data(static_cast<size_t>(count * size_of(dtype)));
  std::normal_distribution<float> normal(0.0f, deviation);
  for (int64_t i = 0; i < count; ++i) store_from_float(data.data(), dtype, i, normal(random));
  return data;
}

inline Context context_of(bool on_gpu) {
  return on_gpu ? Context::cuda(0) : Context::cpu();
}

inline void wait_for_gpu() {
  check(cudaDeviceSynchronize());
}

}  // namespace folio::cuda_test
