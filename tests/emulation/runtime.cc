#include "runtime.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace folio::emulation {

cudaError_t result(cudaError_t status) {
  if (status == cudaSuccess) status = device_fault.load();
  if (status != cudaSuccess) last_error = status;
  return status;
}

void fail_device(const char* what) {
  std::fprintf(stderr, "the emulated GPU has failed: %s\n", what);
  device_fault = cudaErrorLaunchFailure;
}

Runtime& runtime() {
  static auto* const made = new Runtime;  // streams' threads outlive main
  return *made;
}

Stream* stream_of(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) {
    return reinterpret_cast<Stream*>(handle);
  }
  const std::lock_guard lock(runtime().mutex);
  Stream*& stream = runtime().default_streams[current_device];
  if (stream == nullptr) {
    const auto made = std::make_shared<Stream>(current_device);
    runtime().streams.insert(made);
    stream = made.get();
  }
  return stream;
}

bool forbidden_by_capture() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return false;
  bool forbidden = false;
  const std::lock_guard lock(runtime().mutex);
  for (const auto& capture : runtime().captures) {
    const bool mine = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool global = capture->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
    if (!mine && !global) continue;
    capture->invalid = true;
    forbidden = true;
  }
  return forbidden;
}

cudaError_t enqueue(Stream* stream, Work work) {
  if (stream->capture == nullptr) {
    stream->enqueue(std::move(work));
    return cudaSuccess;
  }
  Capture& capture = *stream->capture;
  if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
  capture.nodes.push_back(std::move(work));
  ++capture.pasts[stream][stream];
  return cudaSuccess;
}

const Memory* memory_at(const void* data) {
  auto& all = runtime().memory;
  auto found = all.upper_bound(static_cast<const std::byte*>(data));
  if (found == all.begin()) return nullptr;
  --found;
  return static_cast<const std::byte*>(data) < found->first + std::max<size_t>(found->second.bytes, 1) ? &found->second
                                                                                                       : nullptr;
}

namespace {
enum class Place { kPageable, kPinned, kDevice };
/// Where [data, data + bytes) lies.
Place place_of(const void* data, size_t bytes, bool& inside) {
  const std::lock_guard lock(runtime().mutex);
  const Memory* const memory = memory_at(data);
  inside = true;
  if (memory == nullptr) return Place::kPageable;
  inside = bytes == 0 || memory_at(static_cast<const std::byte*>(data) + bytes - 1) == memory;
  return memory->on_device ? Place::kDevice : Place::kPinned;
}
}  // namespace

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Stream* stream, bool waits) {
  if (bytes == 0) return cudaSuccess;
  bool to_fits = true, from_fits = true;
  const Place to_place = place_of(to, bytes, to_fits);
  const Place from_place = place_of(from, bytes, from_fits);
  if (!to_fits || !from_fits) return cudaErrorInvalidValue;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  // Page-locked memory is a device's, too, where it is mapped.
  if (kind != cudaMemcpyDefault &&
      ((to_device && to_place == Place::kPageable) || (from_device && from_place == Place::kPageable) ||
       (!to_device && to_place == Place::kDevice) || (!from_device && from_place == Place::kDevice))) {
    return cudaErrorInvalidValue;
  }
  if (from_place == Place::kPageable && stream->capture == nullptr) {
    // Read before the call returns.
    const auto* const bytes_of = static_cast<const std::byte*>(from);
    auto staged = std::make_shared<std::vector<std::byte>>(bytes_of, bytes_of + bytes);
    const cudaError_t status = enqueue(stream, [=] { std::memcpy(to, staged->data(), bytes); });
    if (waits) stream->wait();
    return status;
  }
  const cudaError_t status = enqueue(stream, [=] { std::memmove(to, from, bytes); });
  if (waits || (to_place == Place::kPageable && stream->capture == nullptr)) stream->wait();
  return status;
}

cudaError_t allocate(void** data, size_t bytes, bool on_device) {
  if (forbidden_by_capture()) return cudaErrorStreamCaptureUnsupported;
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  constexpr size_t kLarge = size_t{64} << 20;
  constexpr size_t kMost = size_t{64} << 30;
  const char* const most = std::getenv("FOLIO_EMULATED_MOST_BYTES");  // of one allocation, for tests of failures
  if (bytes > (most == nullptr ? kMost : static_cast<size_t>(std::atoll(most)))) return cudaErrorMemoryAllocation;
  // Large blocks take no memory until they are written. Smaller ones of some size can be given a name (peer_memory.cc).
  constexpr size_t kNamed = size_t{1} << 20;
  const bool mapped = bytes >= (on_device ? kNamed : kLarge);
  if (mapped) {
    *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*data == MAP_FAILED) *data = nullptr;
  } else {
    *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  }
  if (*data != nullptr && bytes < kLarge) std::memset(*data, 0xff, bytes);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  const std::lock_guard lock(runtime().mutex);
  runtime().memory[static_cast<const std::byte*>(*data)] = {bytes, on_device, current_device, mapped};
  return cudaSuccess;
}

std::vector<std::shared_ptr<Stream>> streams_of(int32_t device) {
  std::vector<std::shared_ptr<Stream>> streams;
  const std::lock_guard lock(runtime().mutex);
  for (const auto& stream : runtime().streams) {
    if (stream->device() == device) streams.push_back(stream);
  }
  return streams;
}

cudaError_t free_memory(void* data, bool on_device) {
  if (data == nullptr) return cudaSuccess;
  if (forbidden_by_capture()) return cudaErrorStreamCaptureUnsupported;
  Memory memory{};
  {
    const std::lock_guard lock(runtime().mutex);
    const auto found = runtime().memory.find(static_cast<const std::byte*>(data));
    if (found == runtime().memory.end() || found->second.on_device != on_device) return cudaErrorInvalidValue;
    memory = found->second;
    runtime().memory.erase(found);
  }
  for (const auto& stream : streams_of(memory.device)) stream->wait();  // as freeing does on a GPU
  if (memory.mapped) {
    munmap(data, memory.bytes);
    if (memory.file >= 0) close(memory.file);
  } else {
    std::free(data);
  }
  return cudaSuccess;
}

cudaError_t wait_for(Stream* stream) {
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  if (forbidden_by_capture()) return cudaErrorStreamCaptureUnsupported;
  stream->wait();
  return cudaSuccess;
}

}  // namespace folio::emulation
