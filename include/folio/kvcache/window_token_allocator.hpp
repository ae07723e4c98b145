#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "folio/kvcache/slot_changes.hpp"
#include "folio/kvcache/token_allocator.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0 {

/// For models that have layers with a sliding window beside layers without: two pools, so that tokens which have left
/// the window need room in one of them only. A slot is one of the full pool, by which request tables, prefix cache and
/// slot mappings know the token; its *window copy*, a slot of the window pool with the same offset in its page, is
/// where the windowed layers keep it. Both are allocated together.
///
///     WindowTokenAllocator allocator(full_slots, window_slots, page_size);
///     allocator.alloc(slots);                                    // or false: too few of either
///     allocator.to_window(slots, window_slots);                  // what the windowed layers write to and read from
///     allocator.free_window(slots_that_left_the_window);         // they stay held, without window copies
///     cache.extend(lock, {tokens}, slots, changes, window_begin);
///     allocator.apply(changes);
///
/// Order, checks and times are TokenAllocator's; pages go whole. Not thread-safe.
class FOLIO_API WindowTokenAllocator {
 public:
  /// Throws kInvalidArgument as TokenAllocator does, for either number of slots.
  WindowTokenAllocator(int32_t num_slots, int32_t num_window_slots, int32_t page_size = 1);

  int32_t size() const noexcept { return full_.size(); }
  int32_t window_size() const noexcept { return window_.size(); }
  int32_t page_size() const noexcept { return full_.page_size(); }
  int32_t available() const noexcept { return full_.available(); }           ///< slots
  int32_t window_available() const noexcept { return window_.available(); }  ///< window copies
  bool is_held(int32_t slot) const noexcept { return full_.is_held(slot); }
  bool has_window_copy(int32_t slot) const noexcept;  ///< false for slots that are not held

  /// As TokenAllocator's; all or nothing in both pools. A request that goes on in a page without a window copy throws
  /// kInvalidArgument: its new tokens would have none.
  [[nodiscard]] bool alloc(std::span<int32_t> slots);
  [[nodiscard]] bool alloc_extend(std::span<const int32_t> prefix_lens, std::span<const int32_t> seq_lens,
                                  std::span<const int32_t> last_slots, std::span<int32_t> slots);
  [[nodiscard]] bool alloc_decode(std::span<const int32_t> seq_lens, std::span<const int32_t> last_slots,
                                  std::span<int32_t> slots);

  /// Gives back slots with the window copies that they still have.
  void free(std::span<const int32_t> slots);

  /// Gives back the window copies of held slots; those that have none are passed over. Throws kInvalidArgument for
  /// slots that are not held; nothing is then changed.
  void free_window(std::span<const int32_t> slots);

  /// The window copy of `from` becomes that of `to`, for held slots with equal offsets; with pages of more than one
  /// token the whole page's does, however many of its slots are named. Throws kInvalidArgument naming the pair: slots
  /// that are not held, `from` without a copy, `to` with one. Moves before it have then been made.
  void move_window(std::span<const SlotChanges::Move> moves);

  /// Moves, frees window copies, frees: what a call of PrefixCache asked for.
  void apply(const SlotChanges& changes);

  /// window[i] is the window copy of slots[i]: where there is none (slots that are not held, the dummy page), the slot
  /// of the same offset in the window pool's dummy page; -1 for negative slots, as in slot mappings. Throws
  /// kInvalidArgument for different numbers.
  void to_window(std::span<const int32_t> slots, std::span<int32_t> window) const;

  void clear();                   ///< everything free
  void check_invariants() const;  ///< throws kInternal if window copies and window slots do not match; for tests

 private:
  int32_t page_of(int32_t slot) const noexcept { return slot / full_.page_size(); }
  int32_t& copy_of(int32_t slot) noexcept { return copies_[static_cast<size_t>(page_of(slot))]; }
  void add_copies(std::span<const int32_t> slots);
  void drop_copy(int32_t slot);
  void check_held(int32_t slot) const;
  bool has_room(std::span<const int32_t> prefix_lens, std::span<const int32_t> seq_lens,
                std::span<const int32_t> last_slots, size_t num_slots);

  TokenAllocator full_;
  TokenAllocator window_;
  std::vector<int32_t> copies_;   ///< by page: the window page that has its copy; 0 = none
  std::vector<int32_t> scratch_;  ///< one page of window slots
};

}  // namespace folio::inline v0
