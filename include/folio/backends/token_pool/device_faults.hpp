#pragma once

#include <memory>

#include "folio/context.hpp"
#include "folio/types/device.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

namespace token_pool {
struct ListReport;
}

/// What kernels have found wrong with the token pool's arrays on a context's device: rows, lengths, slots, trees.
///
/// Functions that take it come twice. Without it arrays lie on the host, and everything is checked before anything is
/// written. With it they lie on its device; the call is enqueued on `stream`, allocates nothing, waits for nothing and
/// may be captured into a graph. Sizes are still checked at once; what only the device knows is told here, and each
/// function says what it writes then. On a CPU both are the same.
///
/// One object serves any number of calls and must outlive them. Not thread-safe.
class FOLIO_API DeviceFaults {
 public:
  /// Throws kUnavailable for a GPU in a build without CUDA, kOutOfMemory.
  explicit DeviceFaults(const Context& context);

  /// Throws kInvalidArgument naming the request if a kernel has found a fault since the last look: the first, once.
  /// Waits for nothing: what has not run yet has found nothing. O(1).
  void check();

  Device device() const noexcept { return device_; }
  token_pool::ListReport* report() const noexcept { return report_.get(); }  ///< what kernels write; null on a CPU

 private:
  Device device_;
  std::shared_ptr<token_pool::ListReport> report_;
};

}  // namespace folio::inline v0::backends
