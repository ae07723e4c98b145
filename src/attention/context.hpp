#pragma once

#include <memory>
#include <string>

#include "folio/context.hpp"
#include "platform/thread_pool.hpp"

namespace folio::inline v0::detail {

/// What a Context stands for. Immutable once made; the pool it owns, if any, is thread-safe.
struct ContextState {
  Device device;
  Executor executor;                           ///< the engine's, or that of `pool`; parallel_for is never null
  std::string force_kernel;                    ///< empty: none
  std::unique_ptr<platform::ThreadPool> pool;  ///< null with an engine's executor
};

}  // namespace folio::inline v0::detail
