#include "platform/cuda/peer.hpp"

#include <cuda_runtime_api.h>

#include <cstring>

#include "platform/cuda/device.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::platform::cuda {
namespace {

static_assert(sizeof(MemoryName) == sizeof(cudaIpcMemHandle_t));

/// Whether a call has succeeded. What it left as the runtime's last error is forgotten: the next launch would be
/// blamed.
bool succeeded(cudaError_t status) noexcept {
  if (status == cudaSuccess) return true;
  static_cast<void>(cudaGetLastError());
  return false;
}

}  // namespace

DeviceIdentity identity(int32_t index) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index), "asking for a CUDA device's UUID");
  DeviceIdentity identity;
  static_assert(sizeof(identity) == sizeof(properties.uuid));
  std::memcpy(identity.data(), &properties.uuid, sizeof(identity));
  return identity;
}

bool reach(int32_t index, const DeviceIdentity& other) {
  if (identity(index) == other) return true;
  const int32_t count = device_count();
  for (int32_t device = 0; device < count; ++device) {
    if (device == index || identity(device) != other) continue;
    const DeviceScope scope(index);
    const RelaxedCapture relaxed;
    int possible = 0;
    if (!succeeded(cudaDeviceCanAccessPeer(&possible, index, device)) || possible == 0) return false;
    const cudaError_t status = cudaDeviceEnablePeerAccess(device, 0);
    return succeeded(status) || status == cudaErrorPeerAccessAlreadyEnabled;
  }
  return false;
}

std::optional<MemoryName> name_memory(void* data) noexcept {
  cudaIpcMemHandle_t handle;
  if (!succeeded(cudaIpcGetMemHandle(&handle, data))) return std::nullopt;
  MemoryName name;
  std::memcpy(name.data(), &handle, sizeof(name));
  return name;
}

std::shared_ptr<void> open_memory(const MemoryName& name) {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the current CUDA device");
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, name.data(), sizeof(handle));
  const RelaxedCapture relaxed;
  void* data = nullptr;
  if (!succeeded(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess))) return nullptr;
  return {data, [device](void* opened) {
            int previous = 0;
            static_cast<void>(cudaGetDevice(&previous));
            static_cast<void>(cudaSetDevice(device));
            const RelaxedCapture closing;
            static_cast<void>(cudaIpcCloseMemHandle(opened));
            static_cast<void>(cudaSetDevice(previous));
          }};
}

}  // namespace folio::inline v0::platform::cuda
