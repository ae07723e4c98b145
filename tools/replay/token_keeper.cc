#include "replay/token_keeper.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "folio/page_table.hpp"
#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

int32_t slots_of(const TokenKeeperOptions& options, int32_t pages) {
  const int64_t slots = int64_t{pages} * options.page_size;
  if (pages < 1 || options.page_size < 1 || slots > std::numeric_limits<int32_t>::max() - options.page_size) {
    throw Error(ErrorCode::kInvalidArgument,
                "the pool must have 1 slot or more, and fewer than 2^31 with the dummy "
                "page: change --pool-pages, --pool-mb, --window-pages or --page-size");
  }
  return static_cast<int32_t>(slots);
}

int32_t window_slots_of(const TokenKeeperOptions& options) {
  return options.window_left < 0 ? 0 : slots_of(options, options.num_window_pages);
}

PrefixCacheOptions cache_options(const TokenKeeperOptions& options) {
  PrefixCacheOptions made;
  made.page_size = options.page_size;
  if (options.window_left >= 0) made.window_left = std::max(1, options.window_left);
  made.whole_leaves = false;
  return made;
}

/// The longest request must be able to run alone. Besides its step's tokens and drafts it keeps what its window
/// reaches, its own or the tree's; of the tree the whole node that the window begins in, which is at most a step's
/// tokens or, where a request ended, what that one kept.
void check_window_pages(const Workload& workload, const TokenKeeperOptions& options) {
  if (options.window_left < 0) return;
  const int64_t most = int64_t{workload.longest()} + options.draft_tokens;
  const int64_t kept = 2 * (int64_t{options.window_left} + options.token_budget) + options.draft_tokens;
  const int64_t page_size = options.page_size;
  const int64_t needed = std::min((most + page_size - 1) / page_size, kept / page_size + 4);
  if (options.num_window_pages < needed) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the windowed layers' pool has {} pages; a window of {} and a step of {} tokens need {}: "
                            "enlarge it (--window-pages) or lower --token-budget",
                            options.num_window_pages, options.window_left, options.token_budget, needed));
  }
}

}  // namespace

TokenKeeper::TokenKeeper(const Workload& workload, const TokenKeeperOptions& options)
    : workload_(workload),
      options_(options),
      slots_(slots_of(options, options.num_pages), window_slots_of(options), options.page_size),
      rows_(options.max_running, std::max(1, workload.longest()) + options.draft_tokens),
      cache_(cache_options(options)),
      states_(workload.requests.size()) {
  check_window_pages(workload, options);
  if (windowed())
    window_rows_.resize((static_cast<size_t>(rows_.size()) + 1) * static_cast<size_t>(rows_.max_context_len()));
}

int32_t TokenKeeper::held() const {
  return static_cast<int32_t>((slots_.held() - cache_.evictable()) / options_.page_size);
}

WindowUse TokenKeeper::window_use() const {
  if (!windowed()) return {};
  const int64_t held = slots_.window_held() - cache_.window_evictable();
  return {options_.num_window_pages, static_cast<int32_t>(held / options_.page_size), left_copies_, evicted_copies_};
}

PageTableView TokenKeeper::window_rows() const {
  if (!windowed()) return {};
  return dense_table(window_rows_, rows_.size() + 1, rows_.max_context_len());
}

int32_t TokenKeeper::cached() const {
  return static_cast<int32_t>(cache_.evictable() / options_.page_size);
}

std::span<const int32_t> TokenKeeper::tokens(std::span<const uint64_t> chain) {
  tokens_.clear();
  for (const uint64_t link : chain) tokens_.push_back(static_cast<int32_t>(link & 0x7fffffffu));
  return tokens_;
}

/// Brings pages and the request's row up to date with the slots from position `first` on.
void TokenKeeper::rewrite(State& state, int32_t first) {
  const auto page_size = static_cast<size_t>(options_.page_size);
  const auto from = static_cast<size_t>(first);
  state.pages.resize((state.slots.size() + page_size - 1) / page_size);
  for (size_t page = from / page_size; page < state.pages.size(); ++page)
    state.pages[page] = state.slots[page * page_size] / options_.page_size;
  const auto fresh = std::span<const int32_t>(state.slots).subspan(from);
  rows_.write(state.row, first, fresh);
  if (!windowed()) return;
  const size_t entry = static_cast<size_t>(state.row) * static_cast<size_t>(rows_.max_context_len()) + from;
  slots_.to_window(fresh, std::span(window_rows_).subspan(entry, fresh.size()));
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

/// In both pools, where there are two.
bool TokenKeeper::make_room(int64_t slots) {
  const int64_t missing = std::max(int64_t{0}, slots - slots_.available());
  const int64_t missing_copies = windowed() ? std::max(int64_t{0}, slots - slots_.window_available()) : 0;
  if (missing > cache_.evictable() || (windowed() && missing_copies > cache_.window_evictable())) return false;
  if (missing == 0 && missing_copies == 0) return true;
  const PrefixCache::Amount gone = cache_.evict({missing, missing_copies}, changes_);
  evicted_slots_ += gone.slots;
  evicted_copies_ += gone.window_copies;
  slots_.apply(changes_);
  return true;
}

bool TokenKeeper::reserve(int32_t request, int32_t tokens) {
  State& grown = state(request);
  const auto before = static_cast<int32_t>(grown.slots.size());
  if (tokens <= before) return true;
  const int32_t last = before == 0 ? 0 : grown.slots.back();
  const auto missing = static_cast<size_t>(tokens - before);
  const int64_t page_size = options_.page_size;
  const int64_t pages = (tokens + page_size - 1) / page_size - (before + page_size - 1) / page_size;
  if (!make_room(pages * page_size)) return false;
  grown.slots.resize(static_cast<size_t>(tokens));
  if (!slots_.extend(before, tokens, last, std::span(grown.slots).last(missing)))
    throw Error(ErrorCode::kInternal, "the allocator has fewer slots than it says");
  rewrite(grown, before);
  return true;
}

void TokenKeeper::publish(int32_t request, std::span<const uint64_t> chain) {
  State& shown = state(request);
  shown.stored_from = 0;
  if (!windowed()) show(shown, request, chain);
}

void TokenKeeper::computed(int32_t request, std::span<const uint64_t> chain) {
  if (!windowed()) return;
  State& ahead = state(request);
  show(ahead, request, chain);
  ahead.stored_from = 0;
  // The next query reaches back to there; pages that it still reaches stay whole.
  const auto reached = static_cast<int32_t>(chain.size()) - options_.window_left;
  const int32_t begin = reached / options_.page_size * options_.page_size;
  const auto own = static_cast<int32_t>(ahead.lock.length());
  const int32_t from = std::max(own, ahead.window_begin);
  if (begin <= from) return;
  changes_.window_freed.assign(ahead.slots.begin() + from, ahead.slots.begin() + begin);
  left_copies_ += begin - from;
  slots_.apply(changes_);
  ahead.window_begin = begin;
}

void TokenKeeper::show(State& shown, int32_t request, std::span<const uint64_t> chain) {
  // Generated tokens are the request's own: the tree gets them when it ends.
  if (!options_.reuse || shown.published >= workload_.requests[static_cast<size_t>(request)].input_length) return;
  const auto first = static_cast<size_t>(shown.lock.length());
  before_.assign(shown.slots.begin() + static_cast<std::ptrdiff_t>(first), shown.slots.end());
  cache_.extend(shown.lock, {tokens(chain)}, std::span(shown.slots).first(chain.size()), changes_, shown.window_begin);
  slots_.apply(changes_);
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
  slots_.apply(changes_);
  rewrite(verified, computed);
}

void TokenKeeper::release(int32_t request, std::span<const uint64_t> chain) {
  State& ended = state(request);
  const std::span<const int32_t> all = ended.slots;
  const size_t kept = options_.reuse ? chain.size() : 0;
  changes_.freed.assign(all.begin() + static_cast<std::ptrdiff_t>(kept), all.end());
  if (options_.reuse) {
    cache_.finish(std::move(ended.lock), {tokens(chain)}, all.first(kept), changes_, ended.window_begin);
  }
  slots_.apply(changes_);
  rows_.free(ended.row);
  ended = State{};
}

void TokenKeeper::drop_cache() {
  cache_.evict({cache_.size(), 0}, changes_);
  slots_.apply(changes_);
}

}  // namespace folio::replay
