#include "replay/token_keeper.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

int32_t slots_of(const TokenKeeperOptions& options) {
  const int64_t slots = int64_t{options.num_pages} * options.page_size;
  if (options.num_pages < 1 || options.page_size < 1 ||
      slots > std::numeric_limits<int32_t>::max() - options.page_size) {
    throw Error(ErrorCode::kInvalidArgument,
                "the pool must have 1 slot or more, and fewer than 2^31 with the dummy "
                "page: change --pool-pages, --pool-mb or --page-size");
  }
  return static_cast<int32_t>(slots);
}

}  // namespace

TokenKeeper::TokenKeeper(const Workload& workload, const TokenKeeperOptions& options)
    : workload_(workload),
      options_(options),
      allocator_(slots_of(options), options.page_size),
      rows_(options.max_running, std::max(1, workload.longest()) + options.draft_tokens),
      cache_(PrefixCacheOptions{options.page_size, -1}),
      states_(workload.requests.size()) {}

int32_t TokenKeeper::held() const {
  const int64_t slots = int64_t{allocator_.size()} - allocator_.available() - cache_.evictable();
  return static_cast<int32_t>(slots / options_.page_size);
}

int32_t TokenKeeper::cached() const {
  return static_cast<int32_t>(cache_.evictable() / options_.page_size);
}

std::span<const int32_t> TokenKeeper::tokens(std::span<const uint64_t> chain) {
  tokens_.clear();
  for (const uint64_t link : chain) tokens_.push_back(static_cast<int32_t>(link & 0x7fffffffu));
  return tokens_;
}

void TokenKeeper::settle() {
  allocator_.free(changes_.freed);
  changes_.clear();
}

/// Brings pages and the request's row up to date with the slots from position `first` on.
void TokenKeeper::rewrite(State& state, int32_t first) {
  const auto page_size = static_cast<size_t>(options_.page_size);
  const auto from = static_cast<size_t>(first);
  state.pages.resize((state.slots.size() + page_size - 1) / page_size);
  for (size_t page = from / page_size; page < state.pages.size(); ++page)
    state.pages[page] = state.slots[page * page_size] / options_.page_size;
  rows_.write(state.row, first, std::span(state.slots).subspan(from));
}

int32_t TokenKeeper::begin(int32_t request, std::span<const uint64_t> chain) {
  const auto row = rows_.alloc();
  if (!row) throw Error(ErrorCode::kInternal, "more requests run than the request table has rows");
  State& begun = state(request);
  begun.row = *row;
  if (options_.reuse) begun.lock = cache_.acquire({tokens(chain)}, begun.slots);
  begun.published = static_cast<int32_t>(begun.slots.size());
  rewrite(begun, 0);
  return begun.published;
}

bool TokenKeeper::make_room(int64_t slots) {
  const int64_t missing = slots - allocator_.available();
  if (missing <= 0) return true;
  if (missing > cache_.evictable()) return false;
  evicted_slots_ += cache_.evict({missing, 0}, changes_).slots;
  settle();
  return true;
}

bool TokenKeeper::reserve(int32_t request, int32_t tokens) {
  State& grown = state(request);
  const auto before = static_cast<int32_t>(grown.slots.size());
  if (tokens <= before) return true;
  const int32_t last = before == 0 ? 0 : grown.slots.back();
  const auto missing = static_cast<size_t>(tokens - before);
  const int64_t pages = allocator_.fresh_pages({&before, 1}, {&tokens, 1}, {&last, 1}, missing);
  if (!make_room(pages * options_.page_size)) return false;
  grown.slots.resize(static_cast<size_t>(tokens));
  if (!allocator_.alloc_extend({&before, 1}, {&tokens, 1}, {&last, 1}, std::span(grown.slots).last(missing)))
    throw Error(ErrorCode::kInternal, "the allocator has fewer slots than it says");
  rewrite(grown, before);
  return true;
}

void TokenKeeper::publish(int32_t request, std::span<const uint64_t> chain) {
  State& shown = state(request);
  shown.stored_from = 0;
  // Generated tokens are the request's own: the tree gets them when it ends.
  if (!options_.reuse || shown.published >= workload_.requests[static_cast<size_t>(request)].input_length) return;
  const auto first = static_cast<size_t>(shown.lock.length());
  before_.assign(shown.slots.begin() + static_cast<std::ptrdiff_t>(first), shown.slots.end());
  cache_.extend(shown.lock, {tokens(chain)}, std::span(shown.slots).first(chain.size()), changes_);
  settle();
  for (size_t i = 0; i < before_.size(); ++i) {
    if (shown.slots[first + i] != before_[i]) shown.stored_from = static_cast<int32_t>(first + i) + 1;
  }
  shown.published = static_cast<int32_t>(chain.size());
  if (shown.stored_from > 0) rewrite(shown, static_cast<int32_t>(first));
}

void TokenKeeper::accept(int32_t request, int32_t computed, std::span<const int32_t> nodes) {
  State& verified = state(request);
  const auto first = static_cast<size_t>(computed);
  const auto page_size = static_cast<size_t>(options_.page_size);
  std::vector<int32_t>& slots = verified.slots;
  before_.assign(slots.begin() + static_cast<std::ptrdiff_t>(first), slots.end());
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto node = static_cast<size_t>(nodes[i]);
    if (node != i && page_size != 1) throw Error(ErrorCode::kInternal, "tokens cannot move between pages");
    slots[first + i] = before_[node];
    before_[node] = -1;
  }
  // Pages go whole: what is left of the last one stays for the tokens to come.
  const size_t kept = (first + nodes.size() + page_size - 1) / page_size * page_size;
  for (size_t i = 0; i < before_.size(); ++i) {
    if (before_[i] >= 0 && (page_size == 1 || first + i >= kept)) changes_.freed.push_back(before_[i]);
  }
  slots.resize(std::min(slots.size(), kept));
  settle();
  rewrite(verified, computed);
}

void TokenKeeper::release(int32_t request, std::span<const uint64_t> chain) {
  State& ended = state(request);
  const std::span<const int32_t> all = ended.slots;
  const size_t kept = options_.reuse ? chain.size() : 0;
  changes_.freed.assign(all.begin() + static_cast<std::ptrdiff_t>(kept), all.end());
  if (options_.reuse) cache_.finish(std::move(ended.lock), {tokens(chain)}, all.first(kept), changes_);
  settle();
  rows_.free(ended.row);
  ended = State{};
}

void TokenKeeper::drop_cache() {
  cache_.evict({cache_.size(), 0}, changes_);
  settle();
}

}  // namespace folio::replay
