// The CUDA runtime in software: streams are threads, memory is the host's, kernels are fibers (warp_emulator.hpp). What
// Folio and its tests call of the runtime, with the rules that a wrong caller would break: page-locked and device
// memory are told apart, streams run apart, a capture refuses what it must, kernels get the shared memory that they
// asked for.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "kernel_launch.hpp"
#include "runtime.hpp"

namespace folio::emulation {
namespace {

int32_t environment(const char* name, int32_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}
int32_t num_devices() {
  static const int32_t count = environment("FOLIO_EMULATED_GPUS", 1);
  return count;
}

}  // namespace

cudaError_t enqueue_grid(const void* kernel, const dim3& grid, uint32_t threads, size_t shared_bytes,
                         cudaStream_t handle, std::function<void()> body) {
  Stream* const stream = stream_of(handle);
  constexpr size_t kGranted = 48 * 1024;
  size_t most = kGranted;
  {
    const std::lock_guard lock(runtime().mutex);
    const auto found = runtime().shared_memory.find(kernel);
    if (found != runtime().shared_memory.end()) most = std::max(most, found->second);
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || threads == 0 || threads > 1024) {
    return result(cudaErrorInvalidConfiguration);
  }
  if (shared_bytes > most) return result(cudaErrorInvalidValue);
  if (stream->device() != current_device) return result(cudaErrorInvalidResourceHandle);
  static std::atomic<uint64_t> seed{0};
  const cudaError_t status = enqueue(stream, [=, body = std::move(body)] {
    run_grid(grid, static_cast<int32_t>(threads), shared_bytes, ++seed, body);
  });
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  if (blocking != nullptr && std::strcmp(blocking, "1") == 0 && stream->capture == nullptr) stream->wait();
  return result(status);
}

}  // namespace folio::emulation

using namespace folio::emulation;  // NOLINT: the runtime's functions are C functions

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t status = last_error;
  last_error = device_fault.load();
  return status;
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}
const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureUnmatched: return "cudaErrorStreamCaptureUnmatched";
    default: return "an error of the emulated runtime";
  }
}
const char* cudaGetErrorString(cudaError_t status) {
  if (status == cudaErrorMemoryAllocation) return "out of memory";
  return cudaGetErrorName(status);
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return result(cudaSuccess);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return result(cudaErrorInvalidDevice);
  current_device = device;
  return result(cudaSuccess);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const int32_t capability = environment("FOLIO_EMULATED_CAPABILITY", 80);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 3; break;
    case cudaDevAttrComputeCapabilityMajor: *value = capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability % 10; break;
    default: return result(cudaErrorInvalidValue);
  }
  return result(cudaSuccess);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "emulated GPU %d", device);
  cudaDeviceGetAttribute(&properties->multiProcessorCount, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&properties->major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&properties->minor, cudaDevAttrComputeCapabilityMinor, device);
  properties->totalGlobalMem = size_t{8} << 30;
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  return result(cudaSuccess);
}
cudaError_t cudaDeviceSynchronize() {
  if (forbidden_by_capture()) return result(cudaErrorStreamCaptureUnsupported);
  for (const auto& stream : streams_of(current_device)) stream->wait();
  return result(cudaSuccess);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = size_t{8} << 30;
  const std::lock_guard lock(runtime().mutex);
  size_t used = size_t{2} << 30;
  for (const auto& [data, memory] : runtime().memory) {
    if (memory.on_device && memory.device == current_device) used += memory.bytes;
  }
  *free = *total - std::min(used, *total);
  return result(cudaSuccess);
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  return result(allocate(data, bytes, true));
}
cudaError_t cudaFree(void* data) {
  return result(free_memory(data, true));
}
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  return result(allocate(data, bytes, false));
}
cudaError_t cudaMallocHost(void** data, size_t bytes) {
  return result(allocate(data, bytes, false));
}
cudaError_t cudaFreeHost(void* data) {
  return result(free_memory(data, false));
}
cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned) {
  const std::lock_guard lock(runtime().mutex);
  if (memory_at(data) != nullptr) return result(cudaErrorHostMemoryAlreadyRegistered);
  runtime().memory[static_cast<const std::byte*>(data)] = {bytes, false, current_device, false};
  return result(cudaSuccess);
}
cudaError_t cudaHostUnregister(void* data) {
  const std::lock_guard lock(runtime().mutex);
  return result(runtime().memory.erase(static_cast<const std::byte*>(data)) == 1 ? cudaSuccess
                                                                                 : cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (forbidden_by_capture()) return result(cudaErrorStreamCaptureUnsupported);
  return result(copy(to, from, bytes, kind, stream_of(nullptr), true));
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return result(copy(to, from, bytes, kind, stream_of(stream), false));
}
cudaError_t cudaMemset(void* data, int byte, size_t bytes) {
  if (forbidden_by_capture()) return result(cudaErrorStreamCaptureUnsupported);
  return result(enqueue(stream_of(nullptr), [=] { std::memset(data, byte, bytes); }));
}
cudaError_t cudaMemsetAsync(void* data, int byte, size_t bytes, cudaStream_t stream) {
  return result(enqueue(stream_of(stream), [=] { std::memset(data, byte, bytes); }));
}
cudaError_t cudaMemset2DAsync(void* data, size_t pitch, int byte, size_t width, size_t height, cudaStream_t stream) {
  return result(enqueue(stream_of(stream), [=] {
    for (size_t row = 0; row < height; ++row) std::memset(static_cast<std::byte*>(data) + row * pitch, byte, width);
  }));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const std::lock_guard lock(runtime().mutex);
  const auto made = std::make_shared<Stream>(current_device);
  runtime().streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made.get());
  return result(cudaSuccess);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::shared_ptr<Stream> destroyed = stream_of(stream)->shared_from_this();
  {
    const std::lock_guard lock(runtime().mutex);
    runtime().streams.erase(destroyed);
  }
  destroyed->close();
  return result(cudaSuccess);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return result(wait_for(stream_of(stream)));
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (forbidden_by_capture()) return result(cudaErrorStreamCaptureUnsupported);
  return result(stream_of(stream)->idle() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return result(enqueue(stream_of(stream), [=] { function(data); }));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new std::shared_ptr<Event>(std::make_shared<Event>()));
  return result(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
static std::shared_ptr<Event>& event_of(cudaEvent_t event) {
  return *reinterpret_cast<std::shared_ptr<Event>*>(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return result(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  Stream* const stream = stream_of(stream_handle);
  const std::shared_ptr<Event> event = event_of(handle);
  const std::lock_guard lock(event->mutex);
  event->in_capture = stream->capture != nullptr;
  if (event->in_capture) {
    if (stream->capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
    event->capture = stream->capture;
    event->past = stream->capture->pasts[stream];
    return result(cudaSuccess);
  }
  const uint64_t number = ++event->recorded;
  stream->enqueue([=] {
    const std::lock_guard passing(event->mutex);
    event->passed = std::max(event->passed, number);
    event->time = std::chrono::steady_clock::now();
    event->changed.notify_all();
  });
  return result(cudaSuccess);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  Stream* const stream = stream_of(stream_handle);
  const std::shared_ptr<Event> event = event_of(handle);
  const std::lock_guard lock(event->mutex);
  if (event->in_capture) {
    const auto capture = event->capture.lock();
    if (capture == nullptr || (stream->capture != nullptr && stream->capture != capture)) {
      return result(cudaErrorStreamCaptureIsolation);
    }
    stream->capture = capture;
    for (const auto& [other, count] : event->past) {
      size_t& known = capture->pasts[stream][other];
      known = std::max(known, count);
    }
    return result(cudaSuccess);
  }
  if (event->recorded == 0) return result(cudaSuccess);
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return result(cudaErrorStreamCaptureIsolation);
  }
  const uint64_t number = event->recorded;
  stream->enqueue([=] {
    std::unique_lock waiting(event->mutex);
    event->changed.wait(waiting, [&] { return event->passed >= number; });
  });
  return result(cudaSuccess);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  if (forbidden_by_capture()) return result(cudaErrorStreamCaptureUnsupported);
  const std::shared_ptr<Event> event = event_of(handle);
  std::unique_lock lock(event->mutex);
  if (event->in_capture) return result(cudaErrorCapturedEvent);
  event->changed.wait(lock, [&, number = event->recorded] { return event->passed >= number; });
  return result(cudaSuccess);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (forbidden_by_capture()) return result(cudaErrorStreamCaptureUnsupported);
  const std::shared_ptr<Event> event = event_of(handle);
  const std::lock_guard lock(event->mutex);
  if (event->in_capture) return result(cudaErrorCapturedEvent);
  return result(event->passed >= event->recorded ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(event_of(end)->time - event_of(begin)->time).count();
  return result(cudaSuccess);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Stream* const stream = stream_of(handle);
  if (handle == nullptr || handle == cudaStreamLegacy) return result(cudaErrorStreamCaptureUnsupported);
  if (stream->capture != nullptr) return result(cudaErrorIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  stream->capture = capture;
  const std::lock_guard lock(runtime().mutex);
  runtime().captures.insert(std::move(capture));
  return result(cudaSuccess);
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Stream* const stream = stream_of(handle);
  const std::shared_ptr<Capture> capture = stream->capture;
  *graph = nullptr;
  if (capture == nullptr) return result(cudaErrorIllegalState);
  if (capture->origin != stream) return result(cudaErrorStreamCaptureUnmatched);
  bool joined = true;
  {
    const std::lock_guard lock(runtime().mutex);
    runtime().captures.erase(capture);
    for (const auto& shared : runtime().streams) {
      Stream* const other = shared.get();
      if (other->capture != capture) continue;
      joined = joined && capture->pasts[stream][other] == capture->pasts[other][other];
      other->capture = nullptr;
    }
  }
  if (capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
  if (!joined) return result(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{std::move(capture->nodes)});
  return result(cudaSuccess);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const auto& capture = stream_of(handle)->capture;
  *status = capture == nullptr ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return result(cudaSuccess);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return result(cudaSuccess);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return result(cudaSuccess);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  if (graph == nullptr) return result(cudaErrorInvalidValue);
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return result(cudaSuccess);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return result(cudaSuccess);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return result(cudaSuccess);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  // By value: a graph may be destroyed while it runs.
  return result(enqueue(stream_of(stream), [nodes = reinterpret_cast<Graph*>(executable)->nodes] {
    for (const Work& node : nodes) node();
  }));
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  constexpr int kMost = 227 * 1024;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return result(cudaSuccess);
  if (value < 0 || value > kMost) return result(cudaErrorInvalidValue);
  const std::lock_guard lock(runtime().mutex);
  runtime().shared_memory[kernel] = static_cast<size_t>(value);
  return result(cudaSuccess);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&encode_map) : nullptr;
  if (found != nullptr) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return result(cudaSuccess);
}

}  // extern "C"
