#pragma once

#include <algorithm>
#include <cstdint>

#include "folio/context.hpp"

namespace folio::inline v0::attention {

/// Below this, waking other threads costs more than they save.
inline constexpr double kMinBytesPerItem = 65536.0;

/// Work items for `bytes` of memory traffic: a few for each thread, so that a late thread leaves its rest to the
/// others.
inline int64_t wanted_items(const Context& context, double bytes) {
  if (context.concurrency() == 1) return 1;
  return static_cast<int64_t>(std::clamp(bytes / kMinBytesPerItem, 1.0, 4.0 * context.concurrency()));
}

/// Calls body(begin, end), on the context's executor, with at most `items` ranges that together are [0, n).
/// `body` must not throw; nothing is allocated.
template <typename Body>
void for_ranges(const Context& context, int64_t n, int64_t items, const Body& body) {
  items = std::min(items, n);
  if (items <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  struct Split {
    const Body* body;
    int64_t n;
    int64_t items;
    /// The first n % items ranges are one longer.
    int64_t begin(int64_t item) const noexcept { return n / items * item + std::min(item, n % items); }
  };
  Split split{&body, n, items};
  context.parallel_for(
      items,
      [](void* self, int64_t item) noexcept {
        const auto& s = *static_cast<const Split*>(self);
        (*s.body)(s.begin(item), s.begin(item + 1));
      },
      &split);
}

}  // namespace folio::inline v0::attention
