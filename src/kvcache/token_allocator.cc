#include "folio/kvcache/token_allocator.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "kvcache/page_set.hpp"

namespace folio::inline v0 {

struct TokenAllocator::State {
  State(int32_t slots, int32_t page)
      : num_slots(slots),
        page_size(page),
        num_pages(slots / page),
        free(num_pages),
        released(num_pages),
        grouped(num_pages),
        held_slots(static_cast<size_t>(slots) + static_cast<size_t>(page)) {}

  int32_t num_slots;
  int32_t page_size;
  int32_t num_pages;
  kvcache::PageSet free;
  kvcache::PageSet released;
  kvcache::PageSet grouped;
  /// Slots that were handed out and not freed. A page is held if it is in none of the three sets.
  std::vector<bool> held_slots;
  bool group_open = false;

  int32_t available_pages() const { return free.count() + released.count(); }

  bool in_range(int32_t slot) const { return slot >= page_size && slot - page_size < num_slots; }

  bool held(int32_t slot) const { return in_range(slot) && held_slots[static_cast<size_t>(slot)]; }

  /// Makes `pages` of them free, from the release list if need be.
  bool have(int64_t pages) {
    if (pages > available_pages()) return false;
    if (pages > free.count()) free.take_all(released);
    return true;
  }

  /// Slots of one fresh page from its head on; returns how many of `slots` it filled.
  size_t fill_from_fresh_page(std::span<int32_t> slots) {
    const int32_t first = free.take_lowest() * page_size;
    const size_t count = std::min(slots.size(), static_cast<size_t>(page_size));
    for (size_t i = 0; i < count; ++i) hand_out(slots[i], first + static_cast<int32_t>(i));
    return count;
  }

  void hand_out(int32_t& destination, int32_t slot) {
    held_slots[static_cast<size_t>(slot)] = true;
    destination = slot;
  }

  void forget_page(int32_t page) {
    const size_t first = static_cast<size_t>(page) * static_cast<size_t>(page_size);
    for (size_t slot = first; slot < first + static_cast<size_t>(page_size); ++slot) held_slots[slot] = false;
  }

  void check_grows(size_t request, int32_t prefix_len, int32_t seq_len, int32_t last_slot) const {
    core::require(prefix_len >= 0 && seq_len >= prefix_len, "request ", request, " grows from ", prefix_len, " to ",
                  seq_len, " tokens; lengths are not negative and do not shrink");
    if (prefix_len == 0) return;
    core::require(held(last_slot) && !grouped.contains(last_slot / page_size), "the last slot of request ", request,
                  " is ", last_slot, ", which is not held");
    core::require((last_slot + 1) % page_size == prefix_len % page_size, "the last slot of request ", request, " is ",
                  last_slot, ", offset ", last_slot % page_size, " of its page; token ", prefix_len - 1, " has offset ",
                  (prefix_len - 1) % page_size, " in pages of ", page_size);
    check_continues(request, prefix_len, seq_len, last_slot);
  }

  void check_continues(size_t request, int32_t prefix_len, int32_t seq_len, int32_t last_slot) const {
    core::require(!continues(prefix_len, seq_len) || !held(last_slot + 1), "slot ", last_slot + 1,
                  ", the next of request ", request, ", is held already");
  }

  /// True if the request's first new slot lies in the page of its last one.
  bool continues(int32_t prefix_len, int32_t seq_len) const {
    return seq_len > prefix_len && prefix_len % page_size != 0;
  }

  void end_group() {
    while (grouped.count() > 0) {
      const int32_t page = grouped.take_lowest();
      forget_page(page);
      released.add(page);
    }
    group_open = false;
  }

  void check_freeable(int32_t slot) const {
    core::require(slot < 0 || slot >= page_size, "slot ", slot, " is of the dummy page, which is never handed out");
    core::require(in_range(slot), "slot ", slot, " is not of this allocator; it has slots ", page_size, " to ",
                  num_slots + page_size - 1);
    core::require(held(slot), "slot ", slot, " is not held: freed twice, with its page, or never handed out");
  }
};

/// Requests that grow. Checks them and notes the slot that each continues with as held, so that two requests cannot
/// continue one page; takes its notes back unless the call goes through.
class TokenAllocator::Growth {
 public:
  /// Without prefix_lens every request grows by one token.
  Growth(State& state, std::span<const int32_t> prefix_lens, std::span<const int32_t> seq_lens,
         std::span<const int32_t> last_slots)
      : state_(state), prefix_lens_(prefix_lens), seq_lens_(seq_lens), last_slots_(last_slots) {}
  Growth(const Growth&) = delete;
  Growth& operator=(const Growth&) = delete;
  ~Growth() {
    for (size_t r = 0; r < noted_; ++r) note(r, false);
  }

  int32_t prefix_len(size_t r) const { return prefix_lens_.empty() ? seq_lens_[r] - 1 : prefix_lens_[r]; }

  int64_t pages() const { return pages_; }  ///< fresh ones, after check()

  void check(size_t num_slots) {
    core::require(
        (prefix_lens_.empty() || prefix_lens_.size() == seq_lens_.size()) && last_slots_.size() == seq_lens_.size(),
        "there are ", prefix_lens_.size(), " prefix_lens, ", seq_lens_.size(), " seq_lens and ", last_slots_.size(),
        " last_slots; one of each a request");
    int64_t tokens = 0;
    // All before the first note: a slot that another request of this call will get is nobody's last one yet.
    for (size_t r = 0; r < seq_lens_.size(); ++r) {
      state_.check_grows(r, prefix_len(r), seq_lens_[r], last_slots_[r]);
    }
    for (size_t r = 0; r < seq_lens_.size(); ++r) {
      state_.check_continues(r, prefix_len(r), seq_lens_[r], last_slots_[r]);
      note(r, true);
      noted_ = r + 1;
      tokens += seq_lens_[r] - prefix_len(r);
      pages_ += core::ceil_div(seq_lens_[r], state_.page_size) - core::ceil_div(prefix_len(r), state_.page_size);
    }
    core::require(static_cast<size_t>(tokens) == num_slots, "slots has ", num_slots, " entries; the requests grow by ",
                  tokens, " tokens");
  }

  /// All or nothing, after check().
  bool fill(std::span<int32_t> slots) {
    if (!state_.have(pages_)) return false;
    noted_ = 0;
    for (size_t r = 0; r < seq_lens_.size(); ++r) {
      std::span<int32_t> mine = slots.first(static_cast<size_t>(seq_lens_[r] - prefix_len(r)));
      slots = slots.subspan(mine.size());
      int32_t next = last_slots_[r] + 1;
      for (int32_t token = prefix_len(r); !mine.empty() && token % state_.page_size != 0; ++token, ++next) {
        state_.hand_out(mine.front(), next);
        mine = mine.subspan(1);
      }
      while (!mine.empty()) mine = mine.subspan(state_.fill_from_fresh_page(mine));
    }
    return true;
  }

 private:
  void note(size_t r, bool held) {
    if (state_.continues(prefix_len(r), seq_lens_[r])) {
      state_.held_slots[static_cast<size_t>(last_slots_[r]) + 1] = held;
    }
  }

  State& state_;
  std::span<const int32_t> prefix_lens_;
  std::span<const int32_t> seq_lens_;
  std::span<const int32_t> last_slots_;
  size_t noted_ = 0;
  int64_t pages_ = 0;
};

TokenAllocator::TokenAllocator(int32_t num_slots, int32_t page_size) {
  core::require(page_size >= 1, "page_size is ", page_size, "; it must be 1 or more");
  core::require(num_slots >= 0 && num_slots % page_size == 0 && num_slots <= INT32_MAX - page_size, "num_slots is ",
                num_slots, "; it must be a multiple of page_size (", page_size, ") in [0, 2^31 - 1 - page_size]");
  state_ = std::make_unique<State>(num_slots, page_size);
  state_->free.fill(state_->num_pages);
}

TokenAllocator::~TokenAllocator() = default;

int32_t TokenAllocator::size() const noexcept {
  return state_->num_slots;
}

int32_t TokenAllocator::page_size() const noexcept {
  return state_->page_size;
}

int32_t TokenAllocator::available() const noexcept {
  return state_->available_pages() * state_->page_size;
}

bool TokenAllocator::is_held(int32_t slot) const noexcept {
  return state_->held(slot);
}

bool TokenAllocator::alloc(std::span<int32_t> slots) {
  if (!state_->have(core::ceil_div(static_cast<int64_t>(slots.size()), int64_t{state_->page_size}))) return false;
  while (!slots.empty()) slots = slots.subspan(state_->fill_from_fresh_page(slots));
  return true;
}

bool TokenAllocator::alloc_extend(std::span<const int32_t> prefix_lens, std::span<const int32_t> seq_lens,
                                  std::span<const int32_t> last_slots, std::span<int32_t> slots) {
  core::require(prefix_lens.size() == seq_lens.size(), "there are ", prefix_lens.size(), " prefix_lens and ",
                seq_lens.size(), " seq_lens; one of each a request");
  Growth growth(*state_, prefix_lens, seq_lens, last_slots);
  growth.check(slots.size());
  return growth.fill(slots);
}

bool TokenAllocator::alloc_decode(std::span<const int32_t> seq_lens, std::span<const int32_t> last_slots,
                                  std::span<int32_t> slots) {
  Growth growth(*state_, {}, seq_lens, last_slots);
  growth.check(slots.size());
  return growth.fill(slots);
}

int64_t TokenAllocator::fresh_pages(std::span<const int32_t> prefix_lens, std::span<const int32_t> seq_lens,
                                    std::span<const int32_t> last_slots, size_t num_slots) {
  Growth growth(*state_, prefix_lens, seq_lens, last_slots);
  growth.check(num_slots);
  return growth.pages();
}

void TokenAllocator::free(std::span<const int32_t> slots) {
  State& state = *state_;
  // First only the bits of the slots themselves, which tell a slot that comes twice, and can be put back.
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!state.held(slots[i])) {
      for (size_t j = 0; j < i; ++j) state.held_slots[static_cast<size_t>(slots[j])] = true;
      state.check_freeable(slots[i]);
      core::fail(ErrorCode::kInvalidArgument, "slot ", slots[i], " comes twice");
    }
    state.held_slots[static_cast<size_t>(slots[i])] = false;
  }
  for (const int32_t slot : slots) {
    const int32_t page = slot / state.page_size;
    if (state.grouped.contains(page) || state.released.contains(page)) continue;
    if (state.group_open) {
      state.grouped.add(page);
    } else {
      state.forget_page(page);
      state.released.add(page);
    }
  }
}

TokenAllocator::FreeGroup TokenAllocator::free_group() {
  core::require(!state_->group_open, "a group of frees is open; groups do not nest");
  state_->group_open = true;
  return FreeGroup(this);
}

TokenAllocator::FreeGroup::FreeGroup(FreeGroup&& other) noexcept
    : allocator_(std::exchange(other.allocator_, nullptr)) {}

TokenAllocator::FreeGroup::~FreeGroup() {
  if (allocator_ != nullptr) allocator_->state_->end_group();
}

void TokenAllocator::clear() {
  State& state = *state_;
  core::require(!state.group_open, "a group of frees is open; it ends first");
  state.released.clear();
  state.held_slots.assign(state.held_slots.size(), false);
  state.free.fill(state.num_pages);
}

void TokenAllocator::check_invariants() const {
  const State& state = *state_;
  int32_t counted[3] = {0, 0, 0};
  for (int32_t page = 1; page <= state.num_pages; ++page) {
    const bool in[3] = {state.free.contains(page), state.released.contains(page), state.grouped.contains(page)};
    const int sets = in[0] + in[1] + in[2];
    bool any_slot = false;
    for (int32_t i = 0; i < state.page_size; ++i) any_slot = any_slot || state.held(page * state.page_size + i);
    // A page of a group may still have slots that were not freed yet.
    if (sets > 1 || (sets == 0 && !any_slot) || (sets == 1 && any_slot && !in[2])) {
      core::fail(ErrorCode::kInternal, "page ", page, " is in ", sets, " lists and has ", any_slot ? "" : "no ",
                 "held slots");
    }
    for (int i = 0; i < 3; ++i) counted[i] += in[i];
  }
  if (counted[0] != state.free.count() || counted[1] != state.released.count() || counted[2] != state.grouped.count() ||
      (counted[2] != 0 && !state.group_open)) {
    core::fail(ErrorCode::kInternal, "the lists have ", counted[0], ", ", counted[1], " and ", counted[2],
               " pages, their counts are ", state.free.count(), ", ", state.released.count(), " and ",
               state.grouped.count());
  }
}

}  // namespace folio::inline v0
