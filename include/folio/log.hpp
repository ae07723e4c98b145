#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "folio/types/export.hpp"

/// What an engine can see of the core at work. Both are off until they are asked for, and both are the process's: a
/// context, an op or a plan is the same with them. Without them a call costs one relaxed load more.
namespace folio::inline v0 {

enum class LogLevel : int32_t { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

/// Takes one line, without an end of line. May be called from any thread, by several at once.
using LogCallback = std::function<void(LogLevel, std::string_view)>;

/// Hands the core's lines of level `least` and above to `callback`; an empty one is silence. kInfo: contexts that are
/// made, and for each `prepare` the configuration and its kernel. kDebug: besides, why other kernels refused, and every
/// plan with its sizes, which allocates. What the callback throws comes out of the call that logged. Lines that other
/// threads have begun may still come to the callback before.
FOLIO_API void set_log_callback(LogCallback callback, LogLevel least = LogLevel::kInfo);

/// NVTX ranges of the domain "folio" around `plan` and `run`, named after them, with the batch's tokens as payload:
/// what Nsight Systems draws on the thread that called. Throws kUnavailable in a build without NVTX (FOLIO_NVTX). The
/// profiler is found by NVTX itself, which reads NVTX_INJECTION64_PATH at the first range.
FOLIO_API void set_nvtx_ranges(bool on);

}  // namespace folio::inline v0
