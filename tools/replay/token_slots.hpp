#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "folio/pools.hpp"

namespace folio::replay {

/// The slots of one pool, or of two: layers with a sliding window then have copies in a pool of their own.
class TokenSlots {
 public:
  /// Numbers of slots without the dummy page; num_window_slots 0: one pool. Throws kInvalidArgument for numbers that
  /// the allocators do not take.
  TokenSlots(int32_t num_slots, int32_t num_window_slots, int32_t page_size);

  int64_t held() const;              ///< slots
  int64_t window_held() const;       ///< window copies; 0 with one pool
  int64_t available() const;         ///< slots
  int64_t window_available() const;  ///< window copies; with one pool as many as slots

  /// Slots for a request that grows from `before` to `tokens` tokens, of which `last` is the last one's slot. False,
  /// and nothing changed, where there are too few.
  [[nodiscard]] bool extend(int32_t before, int32_t tokens, int32_t last, std::span<int32_t> slots);

  /// Does what is asked for, and forgets it.
  void apply(SlotChanges& changes);

  /// Two pools: where the copies of slots lie.
  void to_window(std::span<const int32_t> slots, std::span<int32_t> window) const { two_->to_window(slots, window); }

 private:
  std::optional<TokenAllocator> one_;
  std::optional<WindowTokenAllocator> two_;
};

}  // namespace folio::replay
