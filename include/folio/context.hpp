#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "folio/types/device.hpp"
#include "folio/types/error.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0 {

namespace detail {
struct ContextState;
}

struct ContextOptions {
  /// CPU only: run on the engine's threads. Its `self` must outlive the context and every op prepared with it.
  /// Without parallel_for, Folio's own pool of `num_threads` threads (the caller's included) is used.
  Executor executor;
  /// 0 = as many as the process may run on (its affinity mask). At most 1024. Must be 0 when an executor is given.
  int32_t num_threads = 0;
  /// The kernel every op must use, by name; as PrepareOptions::force_kernel, which wins over it.
  std::string force_kernel;
  /// As PrepareOptions::allow_fp8_mma, for every op of the context; either permits.
  bool allow_fp8_mma = false;
  /// For finding mistakes: every `run` first checks what attention will read of page tables and indptrs, page ids
  /// included. A fault throws kInvalidArgument naming segment, request, row, column, value and bound, and nothing is
  /// launched. On a GPU the check is a kernel of one CTA, and `run` waits for it. Under capture it does not: a replay's
  /// fault is thrown by `check_plans` and the next `plan` of the buffer, once. There the sizes of tables are not held
  /// against, as a replay may have more rows and pages than the batch that was captured. A GPU's write_kv_cache without
  /// CacheWriteArgs::status checks its slots too, except under capture. The environment variable
  /// FOLIO_VALIDATE_TABLES=1 turns it on for contexts that are made afterwards; 0 or empty leaves it to this field.
  bool validate_tables = false;
  /// CPU only: whether the pool's threads are pinned. Must be kAutomatic when an executor is given. kPinned takes the
  /// CPUs nearest to the caller's: its memory node first, one thread a physical core before sibling threads.
  ThreadPinning pinning = ThreadPinning::kAutomatic;
};

/// A device with its executor. A small shared handle; immutable and safe to use from several threads at once.
class FOLIO_API Context {
 public:
  /// The CPU. Starts the pool's threads. Throws kInvalidArgument for absurd options, and for kPinned with more threads
  /// than the process may run on; kUnavailable where the OS does not pin them; kOutOfMemory. A forked child has
  /// none of these threads: there the context computes on the calling thread alone. Make a new one in the child.
  static Context cpu(const ContextOptions& options = {});
  /// CUDA device `index`, as the runtime counts them. No executor and no num_threads are taken. Throws kUnavailable:
  /// this build has no CUDA kernels, the machine no driver or no such device, or the device is older than any kernel;
  /// kDeviceError: an earlier kernel of this process has failed, and the device computes nothing any more. Calls with
  /// the context may be made whatever device is the thread's current one, which stays so.
  static Context cuda(int32_t index, const ContextOptions& options = {});

  Device device() const noexcept;
  /// How many pieces of work make progress at once: the executor's; the SMs of a GPU.
  int32_t concurrency() const noexcept;
  /// Runs `body` for 0..n-1 on the context's executor: for engines that want to share the pool. Throws kUnsupported on
  /// a GPU, which has no executor.
  void parallel_for(int64_t n, ParallelBody body, void* body_context) const;

  const detail::ContextState& state() const noexcept { return *state_; }

 private:
  explicit Context(std::shared_ptr<const detail::ContextState> state) : state_(std::move(state)) {}
  std::shared_ptr<const detail::ContextState> state_;
};

/// Waits until everything that is enqueued on `stream` so far is done. A CPU enqueues nothing. Throws kDeviceError for
/// what went wrong there.
FOLIO_API void synchronize(const Context& context, Stream stream = {});

/// Lets the context's GPU use `bytes` of ordinary host memory at the host's address, and takes that back: for keys and
/// values that are kept off the device, and for tests. Such memory is slow. `data` begins a page of the operating
/// system. Throws kUnsupported on a CPU, kDeviceError for memory that cannot be mapped.
FOLIO_API void map_host_memory(const Context& context, void* data, size_t bytes);
FOLIO_API void unmap_host_memory(const Context& context, void* data) noexcept;

/// The instruction sets that both the CPU and the OS grant this process, "avx2", "avx512f", "amx_bf16", on AArch64
/// "asimd", "bf16" and so on, sorted.
FOLIO_API std::vector<std::string> cpu_features();

}  // namespace folio::inline v0
