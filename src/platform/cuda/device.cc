#include "platform/cuda/device.hpp"

#include "core/error.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::platform::cuda {

void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) [[likely]] {
    return;
  }
  static_cast<void>(cudaGetLastError());
  core::fail(status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDeviceError,
             is_asynchronous(status) ? "work enqueued before has failed, noticed while " : "", doing, ": ",
             cudaGetErrorString(status), " (", cudaGetErrorName(status), ")");
}

bool is_asynchronous(cudaError_t status) noexcept {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable: return true;
    default: return false;
  }
}

void check_nothing_failed_before() {
  const cudaError_t status = cudaPeekAtLastError();
  if (status == cudaSuccess) [[likely]] {
    return;
  }
  static_cast<void>(cudaGetLastError());
  core::fail(ErrorCode::kDeviceError,
             "an earlier CUDA call or kernel of this process has failed: ", cudaGetErrorString(status), " (",
             cudaGetErrorName(status), "); this call has enqueued nothing");
}

void check_alive(const char* doing) {
  const RelaxedCapture relaxed;
  check(cudaFree(nullptr), doing);  // the cheapest call that a dead device refuses
}

int32_t device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  static_cast<void>(cudaGetLastError());
  return 0;
}

DeviceInfo device_info(int32_t index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    // What the runtime says where there is no driver at all.
    const char* const why = status == cudaErrorInsufficientDriver
                                ? "there is no NVIDIA driver, or one too old for CUDA "
                                  "of this build"
                                : cudaGetErrorString(status);
    core::fail(ErrorCode::kUnavailable, "CUDA device ", index, ": ", why, "; Context::cpu is offered");
  }
  if (index >= count) {
    core::fail(ErrorCode::kUnavailable, "CUDA device ", index, ": this machine shows ", count,
               " devices, counted from 0; Context::cpu is offered");
  }
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index), "asking a CUDA device for its properties");
    return value;
  };
  return {.index = index,
          .num_sms = attribute(cudaDevAttrMultiProcessorCount),
          .compute_capability =
              10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor)};
}

DeviceScope::DeviceScope(int32_t index) {
  check(cudaGetDevice(&previous_), "asking for the current CUDA device");
  if (previous_ == index) return;
  check(cudaSetDevice(index), "choosing a CUDA device");
  changed_ = true;
}

DeviceScope::~DeviceScope() {
  if (changed_) static_cast<void>(cudaSetDevice(previous_));
}

}  // namespace folio::inline v0::platform::cuda
