#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "folio/types/device.hpp"

/// Memory of a GPU, as backends need it besides attention. Implemented in cuda/; in builds without a toolkit every call
/// throws kUnavailable.
namespace folio::inline v0::backends::gpu {

/// Device memory, aligned to 256 bytes and zeroed. Throws kOutOfMemory.
std::shared_ptr<void> allocate(int32_t device, size_t bytes);

/// Copies from the host and waits until the bytes are there, whatever stream reads them next.
void copy_to_device(int32_t device, void* to, const void* from, size_t bytes);

/// Enqueues a copy from the host. On return `from` may be changed, if it is ordinary memory and not page-locked.
void upload(int32_t device, void* to, const void* from, size_t bytes, Stream stream);

/// Enqueues a copy from memory that the GPU reaches, its own or page-locked.
void copy(int32_t device, void* to, const void* from, size_t bytes, Stream stream);

/// `rows` rows of `row_bytes` bytes become zeros.
void zero_rows(int32_t device, void* data, int64_t stride_bytes, int64_t row_bytes, int64_t rows, Stream stream);

}  // namespace folio::inline v0::backends::gpu
