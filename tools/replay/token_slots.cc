#include "replay/token_slots.hpp"

namespace folio::replay {

TokenSlots::TokenSlots(int32_t num_slots, int32_t num_window_slots, int32_t page_size) {
  if (num_window_slots > 0) {
    two_.emplace(num_slots, num_window_slots, page_size);
  } else {
    one_.emplace(num_slots, page_size);
  }
}

int64_t TokenSlots::held() const {
  return int64_t{two_ ? two_->size() : one_->size()} - available();
}

int64_t TokenSlots::window_held() const {
  return two_ ? two_->window_size() - two_->window_available() : 0;
}

int64_t TokenSlots::available() const {
  return two_ ? two_->available() : one_->available();
}

int64_t TokenSlots::window_available() const {
  return two_ ? two_->window_available() : one_->available();
}

bool TokenSlots::extend(int32_t before, int32_t tokens, int32_t last, std::span<int32_t> slots) {
  if (two_) return two_->alloc_extend({&before, 1}, {&tokens, 1}, {&last, 1}, slots);
  return one_->alloc_extend({&before, 1}, {&tokens, 1}, {&last, 1}, slots);
}

void TokenSlots::apply(SlotChanges& changes) {
  if (two_) {
    two_->apply(changes);
  } else {
    one_->free(changes.freed);
  }
  changes.clear();
}

}  // namespace folio::replay
