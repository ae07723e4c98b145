#include "replay/kv_keeper.hpp"

#include "folio/types/error.hpp"

namespace folio::replay {

void KvKeeper::accept(int32_t, int32_t, std::span<const int32_t>) {
  throw Error(ErrorCode::kInternal, "drafts were scheduled for a keeper that does not serve them");
}

void KvKeeper::computed(int32_t, std::span<const uint64_t>) {}

int32_t PageKeeper::begin(int32_t request, std::span<const uint64_t> chain) {
  State& state = states_[static_cast<size_t>(request)];
  const auto page_size = static_cast<size_t>(page_size_);
  keys_.clear();
  for (size_t end = page_size; end <= chain.size(); end += page_size) keys_.push_back(chain[end - 1]);
  state.published = pages_.acquire_prefix(keys_, state.pages);
  return state.published * page_size_;
}

bool PageKeeper::reserve(int32_t request, int32_t tokens) {
  std::vector<int32_t>& pages = states_[static_cast<size_t>(request)].pages;
  const int32_t missing = (tokens + page_size_ - 1) / page_size_ - static_cast<int32_t>(pages.size());
  return missing <= 0 || pages_.allocate(missing, pages);
}

void PageKeeper::publish(int32_t request, std::span<const uint64_t> chain) {
  State& state = states_[static_cast<size_t>(request)];
  const auto full = static_cast<int32_t>(chain.size()) / page_size_;
  for (; state.published < full; ++state.published) {
    const auto last_token = static_cast<size_t>((state.published + 1) * page_size_ - 1);
    pages_.publish(state.pages[static_cast<size_t>(state.published)], chain[last_token]);
  }
}

void PageKeeper::release(int32_t request, std::span<const uint64_t>) {
  State& state = states_[static_cast<size_t>(request)];
  pages_.release(state.pages);
  state = State{};
}

}  // namespace folio::replay
