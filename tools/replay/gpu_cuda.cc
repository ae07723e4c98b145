#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstring>

#include "folio/types/error.hpp"
#include "replay/gpu.hpp"
#include "replay/stopwatch.hpp"

namespace folio::replay::gpu {
namespace {

void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  const ErrorCode code = status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDeviceError;
  throw Error(code, fmt::format("{}: {}", doing, cudaGetErrorString(status)));
}

void select(const Context& context) {
  check(cudaSetDevice(context.device().index), "selecting the GPU");
}

}  // namespace

std::shared_ptr<std::byte> allocate(const Context& context, size_t bytes) {
  select(context);
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "allocating device memory");
  std::shared_ptr<std::byte> memory(static_cast<std::byte*>(data),
                                    [](std::byte* owned) { static_cast<void>(cudaFree(owned)); });
  check(cudaMemset(data, 0, bytes), "clearing device memory");
  check(cudaDeviceSynchronize(), "clearing device memory");
  return memory;
}

std::shared_ptr<std::byte> allocate_shared(const Context& context, size_t bytes) {
  select(context);
  void* data = nullptr;
  check(cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "allocating page-locked memory");
  std::shared_ptr<std::byte> memory(static_cast<std::byte*>(data),
                                    [](std::byte* owned) { static_cast<void>(cudaFreeHost(owned)); });
  std::memset(data, 0, bytes);
  return memory;
}

void upload(const Context& context, void* to, const void* from, size_t bytes) {
  select(context);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, nullptr), "copying to the device");
  check(cudaStreamSynchronize(nullptr), "copying to the device");
}

void wait(const Context& context) {
  if (!is_gpu(context)) return;
  select(context);
  check(cudaDeviceSynchronize(), "waiting for the device");
}

CapturedWork::CapturedWork(const Context& context, const std::function<void(Stream)>& enqueue) {
  select(context);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  stream_ = std::shared_ptr<void>(
      stream, [](void* owned) { static_cast<void>(cudaStreamDestroy(static_cast<cudaStream_t>(owned))); });
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
  cudaGraph_t graph = nullptr;
  try {
    enqueue({stream});
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(stream, &graph));
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph), "ending a capture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
  static_cast<void>(cudaGraphDestroy(graph));
  check(made, "instantiating a graph");
  graph_ = std::shared_ptr<void>(
      executable, [](void* owned) { static_cast<void>(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(owned))); });
}

void CapturedWork::launch() const {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_.get()), static_cast<cudaStream_t>(stream_.get())),
        "launching a graph");
}

int32_t count() {
  int gpus = 0;
  return cudaGetDeviceCount(&gpus) == cudaSuccess ? gpus : 0;
}

double copy_rate(const Context& context, size_t bytes, double min_seconds) {
  const auto from = allocate(context, bytes);
  const auto to = allocate(context, bytes);
  double copied = 0.0;
  Stopwatch watch;
  do {
    check(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, nullptr), "copying on the device");
    check(cudaStreamSynchronize(nullptr), "copying on the device");
    copied += 2.0 * static_cast<double>(bytes);
  } while (watch.elapsed() < min_seconds);
  return copied / watch.elapsed();
}

}  // namespace folio::replay::gpu
