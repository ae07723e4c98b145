#pragma once

#include <algorithm>
#include <cstdint>

#include "folio/context.hpp"

namespace folio::inline v0::attention {

/// Below this, waking other threads costs more than they save.
inline constexpr double kMinBytesPerRange = 65536.0;

/// Ranges to divide `bytes` of memory traffic into: a few for each thread, so that a late thread leaves its rest to the
/// others.
inline int64_t wanted_ranges(const Context& context, double bytes) {
  if (context.concurrency() == 1) return 1;
  return static_cast<int64_t>(std::clamp(bytes / kMinBytesPerRange, 1.0, 4.0 * context.concurrency()));
}

/// Calls body(begin, end), on the context's executor, with at most so many ranges that together are [0, n).
/// `body` must not throw; nothing is allocated.
template <typename Body>
void for_ranges(const Context& context, int64_t n, int64_t ranges, const Body& body) {
  ranges = std::min(ranges, n);
  if (ranges <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  struct Split {
    const Body* body;
    int64_t n;
    int64_t ranges;
    /// The first n % ranges ranges are one longer.
    int64_t begin(int64_t range) const noexcept { return n / ranges * range + std::min(range, n % ranges); }
  };
  Split split{&body, n, ranges};
  context.parallel_for(
      ranges,
      [](void* self, int64_t range) noexcept {
        const auto& s = *static_cast<const Split*>(self);
        (*s.body)(s.begin(range), s.begin(range + 1));
      },
      &split);
}

}  // namespace folio::inline v0::attention
