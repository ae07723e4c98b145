#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

/// Memory of one GPU that another GPU's kernels use, of this process or of another one of this host (CUDA IPC). What
/// cannot be had is an answer here and no error: there is always a way without it.
namespace folio::inline v0::platform::cuda {

using DeviceIdentity = std::array<std::byte, 16>;
using MemoryName = std::array<std::byte, 64>;

/// The device's UUID.
DeviceIdentity identity(int32_t index);

/// Lets kernels of device `index` use the memory of another device of this process, itself included. False where it
/// cannot, or where this process does not see that device.
bool reach(int32_t index, const DeviceIdentity& other);

/// The name of an allocation of the current device.
std::optional<MemoryName> name_memory(void* data) noexcept;

/// Another process's allocation, for kernels of the current device, until the last copy of the pointer goes. Null where
/// it cannot be had.
std::shared_ptr<void> open_memory(const MemoryName& name);

}  // namespace folio::inline v0::platform::cuda
