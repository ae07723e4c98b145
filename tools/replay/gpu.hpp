#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "folio/context.hpp"

/// What an engine asks of CUDA beside Folio's calls: memory, copies, waiting. Implemented in gpu_cuda.cc; in builds
/// without a toolkit, which make no GPU contexts, every call throws folio::Error(kUnavailable).
namespace folio::replay::gpu {

inline bool is_gpu(const Context& context) {
  return context.device().type == DeviceType::kCuda;
}

/// Device memory, zeroed. Throws kOutOfMemory.
std::shared_ptr<std::byte> allocate(const Context& context, size_t bytes);

/// Page-locked host memory, zeroed, that the GPU reads and writes at the same address.
std::shared_ptr<std::byte> allocate_shared(const Context& context, size_t bytes);

/// Copies behind what the default stream has to do, and waits for it.
void upload(const Context& context, void* to, const void* from, size_t bytes);

/// Waits for the device; does nothing for a CPU's context.
void wait(const Context& context);

/// Work in a graph, as an engine replays a step. Begins with what `enqueue` enqueues on the stream that it is given.
class CapturedWork {
 public:
  CapturedWork(const Context& context, const std::function<void(Stream)>& enqueue);
  void launch() const;

 private:
  std::shared_ptr<void> stream_, graph_;
};

/// How many GPUs there are; 0 in builds without CUDA.
int32_t count();

/// Bytes a second, read and written, of copies within device memory.
double copy_rate(const Context& context, size_t bytes, double min_seconds);

}  // namespace folio::replay::gpu
