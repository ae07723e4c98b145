#include "folio/kvcache/window_token_allocator.hpp"

#include <algorithm>
#include <utility>

#include "core/error.hpp"

namespace folio::inline v0 {

WindowTokenAllocator::WindowTokenAllocator(int32_t num_slots, int32_t num_window_slots, int32_t page_size)
    : full_(num_slots, page_size),
      window_(num_window_slots, page_size),
      copies_(static_cast<size_t>(num_slots / page_size) + 1),
      scratch_(static_cast<size_t>(page_size)) {}

bool WindowTokenAllocator::has_window_copy(int32_t slot) const noexcept {
  return full_.is_held(slot) && copies_[static_cast<size_t>(page_of(slot))] != 0;
}

/// A window page for every page that the slots begin. There are enough.
void WindowTokenAllocator::add_copies(std::span<const int32_t> slots) {
  for (const int32_t slot : slots) {
    if (slot % page_size() != 0) continue;
    if (!window_.alloc(scratch_)) core::fail(ErrorCode::kInternal, "a window page was counted that is not there");
    copy_of(slot) = scratch_.front() / page_size();
  }
}

bool WindowTokenAllocator::alloc(std::span<int32_t> slots) {
  const size_t page = scratch_.size();
  const size_t whole = (slots.size() + page - 1) / page * page;
  if (whole > static_cast<size_t>(window_available()) || !full_.alloc(slots)) return false;
  add_copies(slots);
  return true;
}

/// Whether both pools have the pages for requests that grow, after the checks of their arguments.
bool WindowTokenAllocator::has_room(std::span<const int32_t> prefix_lens, std::span<const int32_t> seq_lens,
                                    std::span<const int32_t> last_slots, size_t num_slots) {
  const int64_t pages = full_.fresh_pages(prefix_lens, seq_lens, last_slots, num_slots);
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    const int32_t prefix_len = prefix_lens.empty() ? seq_lens[r] - 1 : prefix_lens[r];
    if (prefix_len % page_size() == 0 || seq_lens[r] == prefix_len) continue;
    core::require(has_window_copy(last_slots[r]), "request ", r, " goes on in the page of slot ", last_slots[r],
                  ", which has no window copy");
  }
  return pages * page_size() <= std::min(available(), window_available());
}

bool WindowTokenAllocator::alloc_extend(std::span<const int32_t> prefix_lens, std::span<const int32_t> seq_lens,
                                        std::span<const int32_t> last_slots, std::span<int32_t> slots) {
  if (!has_room(prefix_lens, seq_lens, last_slots, slots.size())) return false;
  if (!full_.alloc_extend(prefix_lens, seq_lens, last_slots, slots)) return false;
  add_copies(slots);
  return true;
}

bool WindowTokenAllocator::alloc_decode(std::span<const int32_t> seq_lens, std::span<const int32_t> last_slots,
                                        std::span<int32_t> slots) {
  if (!has_room({}, seq_lens, last_slots, slots.size())) return false;
  if (!full_.alloc_decode(seq_lens, last_slots, slots)) return false;
  add_copies(slots);
  return true;
}

void WindowTokenAllocator::drop_copy(int32_t slot) {
  const int32_t page = std::exchange(copy_of(slot), 0);
  const int32_t first = page * page_size();
  if (page != 0) window_.free({&first, 1});
}

void WindowTokenAllocator::free(std::span<const int32_t> slots) {
  full_.free(slots);
  for (const int32_t slot : slots) drop_copy(slot);
}

void WindowTokenAllocator::check_held(int32_t slot) const {
  core::require(full_.is_held(slot), "slot ", slot, " is not held");
}

void WindowTokenAllocator::free_window(std::span<const int32_t> slots) {
  for (const int32_t slot : slots) check_held(slot);
  for (const int32_t slot : slots) drop_copy(slot);
}

void WindowTokenAllocator::move_window(std::span<const SlotChanges::Move> moves) {
  for (size_t i = 0; i < moves.size(); ++i) {
    const auto [from, to] = moves[i];
    check_held(from);
    check_held(to);
    core::require(from % page_size() == to % page_size(), "the window copy of slot ", from,
                  " cannot become that of slot ", to, ": their offsets in pages of ", page_size(), " differ");
    // The other slots of a page that has just been moved.
    if (i > 0 && page_of(from) == page_of(moves[i - 1].from) && page_of(to) == page_of(moves[i - 1].to)) continue;
    core::require(copy_of(from) != 0 && copy_of(to) == 0, "the window copy of slot ", from,
                  " cannot become that of slot ", to, copy_of(from) == 0 ? ": there is none" : ", which has one");
    copy_of(to) = std::exchange(copy_of(from), 0);
  }
}

void WindowTokenAllocator::apply(const SlotChanges& changes) {
  move_window(changes.moved);
  free_window(changes.window_freed);
  free(changes.freed);
}

void WindowTokenAllocator::to_window(std::span<const int32_t> slots, std::span<int32_t> window) const {
  core::require(slots.size() == window.size(), "there are ", slots.size(), " slots and ", window.size(),
                " places for window copies");
  for (size_t i = 0; i < slots.size(); ++i) {
    const int32_t slot = slots[i];
    if (slot < 0) {
      window[i] = -1;
    } else {
      const int32_t page = has_window_copy(slot) ? copies_[static_cast<size_t>(page_of(slot))] : 0;
      window[i] = page * page_size() + slot % page_size();
    }
  }
}

void WindowTokenAllocator::clear() {
  full_.clear();
  window_.clear();
  std::fill(copies_.begin(), copies_.end(), 0);
}

void WindowTokenAllocator::check_invariants() const {
  full_.check_invariants();
  window_.check_invariants();
  int32_t copies = 0;
  for (size_t page = 0; page < copies_.size(); ++page) {
    if (copies_[page] == 0) continue;
    ++copies;
    bool held = false;
    for (int32_t i = 0; i < page_size(); ++i)
      held = held || full_.is_held(static_cast<int32_t>(page) * page_size() + i);
    if (!held || !window_.is_held(copies_[page] * page_size())) {
      core::fail(ErrorCode::kInternal, "page ", page, " has window page ", copies_[page], ", and one of them is free");
    }
  }
  if (copies * page_size() != window_size() - window_available()) {
    core::fail(ErrorCode::kInternal, copies, " pages have window copies, ",
               (window_size() - window_available()) / page_size(), " window pages are held");
  }
}

}  // namespace folio::inline v0
