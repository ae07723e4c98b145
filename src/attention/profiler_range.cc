#include "attention/profiler_range.hpp"

#include <atomic>

#include "core/error.hpp"
#include "folio/log.hpp"

namespace folio::inline v0 {
namespace {

std::atomic<bool> ranges_on{false};

}  // namespace

bool attention::ranges_are_on() noexcept {
  return ranges_on.load(std::memory_order_relaxed);
}

void set_nvtx_ranges(bool on) {
  if (on && !attention::has_nvtx()) {
    core::fail(ErrorCode::kUnavailable, "this build of Folio has no NVTX: it takes CUDA and FOLIO_NVTX=ON");
  }
  ranges_on.store(on, std::memory_order_relaxed);
}

}  // namespace folio::inline v0
