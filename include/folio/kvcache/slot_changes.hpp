#pragma once

#include <cstdint>
#include <vector>

namespace folio::inline v0 {

/// What a call of PrefixCache wants done with slots. Calls append; the owner of the allocator does it, moves first:
/// WindowTokenAllocator::apply, or TokenAllocator::free(freed) where there is no window.
struct SlotChanges {
  /// The window copy of `from`, a slot of the request, becomes that of `to`, a slot of the tree that had none.
  struct Move {
    int32_t from = 0;
    int32_t to = 0;
    friend bool operator==(const Move&, const Move&) = default;
  };
  std::vector<Move> moved;            ///< windowed caches only
  std::vector<int32_t> window_freed;  ///< windowed caches only: these slots lose their window copies and stay held
  std::vector<int32_t> freed;         ///< these slots are nobody's any more, their window copies included

  bool empty() const noexcept { return moved.empty() && window_freed.empty() && freed.empty(); }
  void clear() noexcept {
    moved.clear();
    window_freed.clear();
    freed.clear();
  }
};

}  // namespace folio::inline v0
