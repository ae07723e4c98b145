#include "kvcache/engine_model_test_util.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace folio::testing {
namespace {

constexpr size_t kMaxRunning = 6;
constexpr size_t kMaxSeen = 24;

void expect(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

}  // namespace

EngineModel::EngineModel(const Options& options)
    : options_(options),
      random_(options.seed),
      cache_({options.page_size, options.window_left, options.whole_leaves}),
      allocator_(options.num_slots, options.num_window_slots, options.page_size),
      rows_(static_cast<int32_t>(kMaxRunning), 2 * options.max_len),
      naive_(options.page_size, std::max(options.window_left, 0)),
      content_(static_cast<size_t>(options.num_slots + options.page_size)),
      window_content_(static_cast<size_t>(options.num_window_slots + options.page_size)) {}

void EngineModel::run(int64_t operations) {
  for (int64_t i = 0; i < operations; ++i) {
    step();
    if (i % 32 == 0) check_sizes();
    if (i % 256 == 0) {
      cache_.check_invariants();
      allocator_.check_invariants();
    }
  }
}

void EngineModel::step() {
  const int32_t kind = below(100);
  if (running_.empty() || (kind < 15 && running_.size() < kMaxRunning)) return start();
  const size_t index = static_cast<size_t>(below(static_cast<int32_t>(running_.size())));
  if (kind < 60) return decode(running_[index]);
  if (kind < 75) return extend(running_[index]);
  if (kind < 82) return end(index, true);
  if (kind < 85) return end(index, false);
  if (kind < 95) return match();
  evict(below(2) * below(20), windowed() ? below(2) * below(20) : 0);
}

std::vector<int32_t> EngineModel::random_tokens() {
  std::vector<int32_t> tokens;
  if (!seen_.empty() && below(4) != 0) {
    const auto& like = seen_[static_cast<size_t>(below(static_cast<int32_t>(seen_.size())))];
    tokens.assign(like.begin(), like.begin() + below(static_cast<int32_t>(like.size()) + 1));
  }
  const int32_t more = 1 + below(options_.max_len / 4);
  for (int32_t i = 0; i < more; ++i) tokens.push_back(below(options_.alphabet));
  tokens.resize(std::min(tokens.size(), static_cast<size_t>(options_.max_len)));
  return tokens;
}

/// Stands for the keys and values of token length - 1: a function of everything up to it.
uint64_t EngineModel::content_of(const Request& request, size_t length) const {
  uint64_t value = 0xcbf29ce484222325u + request.extra_key.size();
  for (size_t i = 0; i < length; ++i) value = (value ^ static_cast<uint64_t>(request.tokens[i] + 1)) * 0x100000001b3u;
  return value | 1;
}

int32_t EngineModel::window_slot(int32_t slot) const {
  int32_t window = 0;
  allocator_.to_window({&slot, 1}, {&window, 1});
  return window;
}

/// "Computes" tokens from `from` on.
void EngineModel::store(const Request& request, size_t from) {
  for (size_t i = from; i < request.tokens.size(); ++i) {
    const uint64_t value = content_of(request, i + 1);
    content_[static_cast<size_t>(request.slots[i])] = value;
    window_content_[static_cast<size_t>(window_slot(request.slots[i]))] = value;
  }
}

void EngineModel::forget(const SlotChanges& changes) {
  for (const int32_t slot : changes.window_freed) window_content_[static_cast<size_t>(window_slot(slot))] = 0;
  for (const int32_t slot : changes.freed) {
    content_[static_cast<size_t>(slot)] = 0;
    window_content_[static_cast<size_t>(window_slot(slot))] = 0;
  }
}

void EngineModel::apply(const SlotChanges& changes) {
  allocator_.move_window(changes.moved);
  healed_slots_ += static_cast<int64_t>(changes.moved.size());
  forget(changes);
  allocator_.apply({{}, changes.window_freed, changes.freed});
}

/// That attention of the request's next token would read the right keys: in the full pool, and in the window.
void EngineModel::check_readable(const Request& request) const {
  const size_t length = request.tokens.size();
  const size_t window = windowed() ? static_cast<size_t>(options_.window_left) : length;
  const std::span<const int32_t> row = rows_.row(request.row);
  uint64_t value = 0xcbf29ce484222325u + request.extra_key.size();
  for (size_t i = 0; i < length; ++i) {
    value = (value ^ static_cast<uint64_t>(request.tokens[i] + 1)) * 0x100000001b3u;
    const auto slot = static_cast<size_t>(row[i]);
    expect(content_[slot] == (value | 1), "a slot does not hold its token's keys");
    if (i + window < length) continue;
    const auto copy = static_cast<size_t>(window_slot(row[i]));
    expect(copy != 0 && window_content_[copy] == (value | 1), "a window copy does not hold its token's keys");
  }
}

void EngineModel::start() {
  Request request;
  request.extra_key = std::string(static_cast<size_t>(below(3) == 0), 'x');
  request.tokens = random_tokens();
  const std::span<const int32_t> known = std::span(request.tokens).first(request.tokens.size() - 1);
  std::vector<int32_t> expected;
  const int64_t expected_length = naive_.find(request.extra_key, known, &expected);
  expect(cache_.match({known, request.extra_key}) == expected_length, "match is not the longest prefix");
  request.lock = cache_.acquire({known, request.extra_key}, request.slots);
  expect(request.lock.length() == expected_length && request.slots == expected, "acquire is not the longest prefix");
  naive_.lock(request.extra_key, request.tokens, expected_length, 1);
  hit_tokens_ += expected_length;

  std::vector<int32_t> fresh(request.tokens.size() - request.slots.size());
  if (!allocator_.alloc(fresh)) {
    const auto missing = static_cast<int64_t>(fresh.size()) + options_.page_size;
    evict(std::max<int64_t>(0, missing - allocator_.available()),
          windowed() ? std::max<int64_t>(0, missing - allocator_.window_available()) : 0);
    if (!allocator_.alloc(fresh)) {
      naive_.lock(request.extra_key, request.tokens, expected_length, -1);
      if (!running_.empty()) end(0, true);
      return;
    }
  }
  request.slots.insert(request.slots.end(), fresh.begin(), fresh.end());
  request.row = rows_.alloc().value();
  rows_.write(request.row, 0, request.slots);
  store(request, static_cast<size_t>(expected_length));
  check_readable(request);
  running_.push_back(std::move(request));
}

void EngineModel::decode(Request& request) {
  const auto length = static_cast<int32_t>(request.tokens.size());
  if (length >= options_.max_len) return;
  const int32_t seq_len = length + 1;
  int32_t slot = -1;
  const auto grow = [&] { return allocator_.alloc_decode({&seq_len, 1}, {&request.slots.back(), 1}, {&slot, 1}); };
  if (!grow()) {
    evict(options_.page_size, windowed() ? options_.page_size : 0);
    if (!grow()) return;
  }
  request.tokens.push_back(below(options_.alphabet));
  request.slots.push_back(slot);
  rows_.write(request.row, length, {&slot, 1});
  store(request, static_cast<size_t>(length));
  check_readable(request);
  if (!windowed()) return;
  const int64_t left = std::max<int64_t>(0, seq_len - options_.window_left);
  const int64_t begin = std::max(request.window_begin, left - left % options_.page_size);
  SlotChanges changes;
  for (int64_t i = std::max(request.lock.length(), request.window_begin); i < begin; ++i) {
    changes.window_freed.push_back(request.slots[static_cast<size_t>(i)]);
  }
  request.window_begin = begin;
  apply(changes);
}

void EngineModel::extend(Request& request) {
  SlotChanges expected;
  std::vector<int32_t> slots = request.slots;
  const int64_t from = request.lock.length();
  const auto end = static_cast<int64_t>(request.tokens.size()) / options_.page_size * options_.page_size;
  int64_t length = from;
  if (request.window_begin < end) {
    length = naive_.hand_over(request.extra_key, request.tokens, slots, from, request.window_begin, true, expected);
  }
  SlotChanges changes;
  cache_.extend(request.lock, {request.tokens, request.extra_key}, request.slots, changes, request.window_begin);
  expect(request.slots == slots, "extend writes back other slots");
  expect(request.lock.length() == length, "extend locks another length");
  expect(changes.freed == expected.freed && changes.moved == expected.moved && changes.window_freed.empty(),
         "extend wants other changes");
  naive_.lock(request.extra_key, request.tokens, from, -1);
  naive_.lock(request.extra_key, request.tokens, length, 1);
  rows_.write(request.row, 0, request.slots);
  apply(changes);
  check_readable(request);
}

void EngineModel::end(size_t index, bool keep) {
  Request request = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  const int64_t from = request.lock.length();
  naive_.lock(request.extra_key, request.tokens, from, -1);
  SlotChanges changes;
  if (keep) {
    SlotChanges expected;
    std::vector<int32_t> slots = request.slots;
    const int64_t length =
        naive_.hand_over(request.extra_key, request.tokens, slots, from, request.window_begin, false, expected);
    expected.freed.insert(expected.freed.end(), slots.begin() + length, slots.end());
    cache_.finish(std::move(request.lock), {request.tokens, request.extra_key}, request.slots, changes,
                  request.window_begin);
    expect(changes.freed == expected.freed && changes.moved == expected.moved && changes.window_freed.empty(),
           "finish wants other changes");
    if (seen_.size() < kMaxSeen) seen_.emplace_back();
    seen_[static_cast<size_t>(below(static_cast<int32_t>(seen_.size())))] = request.tokens;
    if (seen_.back().empty()) seen_.back() = request.tokens;
  } else {
    request.lock.reset();
    changes.freed.assign(request.slots.begin() + from, request.slots.end());
  }
  apply(changes);
  rows_.free(request.row);
}

void EngineModel::match() {
  const std::string extra_key(static_cast<size_t>(below(2)), 'x');
  const std::vector<int32_t> tokens = random_tokens();
  expect(cache_.match({tokens, extra_key}) == naive_.find(extra_key, tokens), "match is not the longest prefix");
}

void EngineModel::evict(int64_t slots, int64_t window_copies) {
  SlotChanges changes;
  const int64_t before = naive_.copies();
  const PrefixCache::Amount gone = cache_.evict({slots, window_copies}, changes);
  naive_.evicted(changes);
  expect(gone.slots == static_cast<int64_t>(changes.freed.size()), "evict counts other slots");
  expect(!windowed() || gone.window_copies == before - naive_.copies(), "evict counts other window copies");
  expect(gone.slots >= slots || cache_.evictable() == 0, "evict stops too early");
  // Tombstones go with the leaf behind them.
  const bool exact = !options_.whole_leaves && !windowed();
  expect(!exact || gone.slots < slots + options_.page_size, "evict takes more pages than are needed");
  expect(gone.window_copies >= window_copies || cache_.window_evictable() == 0, "evict keeps window copies");
  for (const Request& request : running_) {
    naive_.check_locked_window(request.extra_key, request.tokens, request.lock.length());
  }
  evicted_slots_ += gone.slots;
  apply(changes);
}

void EngineModel::check_sizes() {
  expect(cache_.size() == naive_.size(), "the cache's size is wrong");
  expect(cache_.protected_slots() == naive_.locked(), "the cache protects other slots than locks keep");
  expect(cache_.evictable() + cache_.protected_slots() == cache_.size(), "sizes do not add up");
  expect(cache_.window_size() == (windowed() ? naive_.copies() : 0), "the cache's window copies are miscounted");
}

void EngineModel::drain() {
  while (!running_.empty()) end(running_.size() - 1, true);
  check_sizes();
  evict(cache_.size(), 0);
  cache_.check_invariants();
  allocator_.check_invariants();
  expect(cache_.size() == 0 && cache_.num_nodes() == 0, "the cache does not empty");
  expect(allocator_.available() == allocator_.size(), "slots leaked");
  expect(allocator_.window_available() == allocator_.window_size(), "window slots leaked");
  expect(rows_.available() == rows_.size(), "rows leaked");
}

}  // namespace folio::testing
