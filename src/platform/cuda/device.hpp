#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

/// CUDA devices. Every call is checked: a failure throws Error(kDeviceError) with CUDA's own words.
namespace folio::inline v0::platform::cuda {

/// Throws unless `status` is cudaSuccess: Error(kOutOfMemory) for cudaErrorMemoryAllocation, else Error(kDeviceError),
/// saying what was being done; of a failed kernel that it was enqueued before. The error is not left behind for the
/// next call of the runtime to find.
void check(cudaError_t status, const char* doing);

/// Whether `status` is the failure of work on the device. It comes from any later call of the process, which is then
/// not what failed.
bool is_asynchronous(cudaError_t status) noexcept;

/// Throws Error(kDeviceError) where an earlier CUDA call of this thread, whoever made it, has left a failure that the
/// next launch would be blamed for. Forgets it.
void check_nothing_failed_before();

/// Throws Error(kDeviceError) where the current device computes nothing any more, as after a kernel's illegal address.
void check_alive(const char* doing);

/// What Folio asks of a device.
struct DeviceInfo {
  int32_t index = 0;
  int32_t num_sms = 0;
  int32_t compute_capability = 0;  ///< 10 * major + minor: 90 on Hopper
};

/// Throws Error(kUnavailable) where there is no driver, no GPU, or no GPU of this index, saying how many there are.
DeviceInfo device_info(int32_t index);

/// How many devices the driver shows; 0 without a driver. Never throws.
int32_t device_count() noexcept;

/// Makes a device the calling thread's current one, and restores the previous one.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace folio::inline v0::platform::cuda
