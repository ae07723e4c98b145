#pragma once

#include <cstdint>

namespace folio::inline v0 {

enum class DeviceType : int32_t { kCpu = 0, kCuda = 1 };

/// A device: its type and, for GPUs, the CUDA ordinal. The CPU is {kCpu, 0}.
struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Where an array lies. On a CPU context everything is kHost.
enum class Where : int32_t { kHost = 0, kDevice = 1 };

/// An ordered queue of device work: a cudaStream_t on a GPU (null = the legacy default stream). A CPU context runs
/// every call to its end before returning and takes only the default-constructed Stream.
struct Stream {
  void* handle = nullptr;
};

/// What an Executor calls: `body(context, index)`. It never throws.
using ParallelBody = void (*)(void* context, int64_t index) noexcept;

/// Where CPU work runs when the engine has its own threads. `parallel_for` must call body(context, i) exactly once for
/// every i in [0, n) and return when all calls have; in any order, on any number of threads, even one after the other.
/// It must not throw. `concurrency` (>= 1) is the number of calls that can make progress at once: planning uses it,
/// results at the default determinism level depend on it, and nothing else does.
struct Executor {
  void* self = nullptr;
  int32_t concurrency = 1;
  void (*parallel_for)(void* self, int64_t n, ParallelBody body, void* context) = nullptr;
};

/// Whether the threads of Folio's own pool stay on one CPU each. The caller's thread is never pinned.
/// kAutomatic pins where the process was given CPUs of its own (an affinity mask that is narrower than the machine, by
/// taskset, numactl, a cpuset or the engine) and the pool has as many threads as the mask has CPUs.
enum class ThreadPinning : int32_t { kAutomatic = 0, kPinned = 1, kUnpinned = 2 };

}  // namespace folio::inline v0
