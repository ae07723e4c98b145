#pragma once

#include <memory>
#include <string>

#include "attention/gpu_backend.hpp"
#include "folio/context.hpp"
#include "platform/thread_pool.hpp"

namespace folio::inline v0::detail {

/// What a Context stands for. Immutable once made; the pool it owns, if any, is thread-safe.
struct ContextState {
  Device device;
  Executor executor;                                 ///< the engine's, or that of `pool`; a GPU has none
  std::string force_kernel;                          ///< empty: none
  bool allow_fp8_mma = false;                        ///< of every op
  std::unique_ptr<platform::ThreadPool> pool;        ///< null with an engine's executor
  std::shared_ptr<const attention::GpuBackend> gpu;  ///< null on a CPU
};

}  // namespace folio::inline v0::detail
