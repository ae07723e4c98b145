// Token allocators, the request table and the prefix cache, from arbitrary sizes, slots, tokens and lengths. A set of
// held slots is the model: what is accepted hands out or takes back just those, what is refused changes nothing.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "calls.hpp"
#include "folio/pools.hpp"

namespace {

using folio::ErrorCode;
using Ints = std::vector<int32_t>;

int32_t take_usual(FuzzInput& input, int32_t low, int32_t high) {
  const auto kind = input.take<uint8_t>();
  return kind < 248 ? low + kind % (high - low + 1) : input.take<int32_t>();
}

Ints take_slots(FuzzInput& input, const std::set<int32_t>& held, int32_t page_size) {
  Ints slots;
  for (int32_t i = input.take<uint8_t>() % 5; i > 0; --i) {
    const auto kind = input.take<uint8_t>();
    if (kind < 200 && !held.empty()) {
      slots.push_back(*std::next(held.begin(), kind % static_cast<int>(held.size())) + (kind == 0 ? page_size : 0));
    } else {
      slots.push_back(take_usual(input, -1, 40));
    }
  }
  return slots;
}

/// What a request that grows has and gets.
struct Growth {
  Ints prefix_lens, seq_lens, last_slots;
  size_t fresh = 0;
};

Growth take_growth(FuzzInput& input, const std::set<int32_t>& held, int32_t page_size) {
  Growth growth;
  for (int32_t i = input.take<uint8_t>() % 4; i > 0; --i) {
    growth.prefix_lens.push_back(take_usual(input, 0, 8));
    growth.seq_lens.push_back(take_usual(input, 0, 12));
    int32_t last = take_usual(input, -1, 40);
    const int64_t offset = (int64_t{growth.prefix_lens.back()} - 1) % page_size;
    if (!held.empty() && offset >= 0 && input.take<uint8_t>() % 8 != 0) {
      const int32_t slot = *std::next(held.begin(), input.take<uint8_t>() % static_cast<int>(held.size()));
      last = slot / page_size * page_size + static_cast<int32_t>(offset);
    }
    growth.last_slots.push_back(last);
    const int64_t more = int64_t{growth.seq_lens.back()} - growth.prefix_lens.back();
    growth.fresh += static_cast<size_t>(std::clamp<int64_t>(more, 0, 100));
  }
  if (input.take<uint8_t>() == 255) growth.fresh += 1;
  if (input.take<uint8_t>() == 255) growth.last_slots.push_back(1);
  return growth;
}

/// Either allocator: the one for windows has two pools, whose windows are as many here and are never given up alone.
template <typename Allocator>
void check_allocator(FuzzInput& input, Allocator& allocator) {
  const int32_t page_size = allocator.page_size(), num_pages = allocator.size() / page_size;
  std::set<int32_t> held;
  const auto held_of = [&](int32_t page) {  // the first slot of a page that is held, and where the page's slots end
    return std::make_pair(held.lower_bound(page * page_size), held.lower_bound((page + 1) * page_size));
  };
  const auto pages_held = [&] {
    int32_t pages = 0;
    for (int32_t page = 1; page <= num_pages; ++page) pages += held_of(page).first != held_of(page).second ? 1 : 0;
    return pages;
  };
  const auto hold = [&](int32_t slot, bool fresh_page) {
    const int32_t page = slot / page_size;
    FUZZ_CHECK(slot >= page_size && page <= num_pages);
    FUZZ_CHECK((held_of(page).first == held_of(page).second) == fresh_page);
    FUZZ_CHECK(held.insert(slot).second);
  };
  for (int calls = input.take_between(1, 12); calls > 0; --calls) {
    switch (input.take<uint8_t>() % 4) {
      case 0: {
        Ints slots(static_cast<size_t>(input.take<uint8_t>() % 20), -7);
        const auto pages = (static_cast<int32_t>(slots.size()) + page_size - 1) / page_size;
        const bool room = pages <= num_pages - pages_held();
        FUZZ_CHECK(allocator.alloc(slots) == room);
        for (size_t i = 0; room && i < slots.size(); ++i) hold(slots[i], i % static_cast<size_t>(page_size) == 0);
        break;
      }
      case 1: {
        const Growth growth = take_growth(input, held, page_size);
        Ints slots(growth.fresh, -7);
        bool done = false;
        if (!accepted([&] {
              done = allocator.alloc_extend(growth.prefix_lens, growth.seq_lens, growth.last_slots, slots);
            })) {
          FUZZ_CHECK(std::all_of(slots.begin(), slots.end(), [](int32_t slot) { return slot == -7; }));
          break;
        }
        size_t next = 0;
        for (size_t r = 0; done && r < growth.prefix_lens.size(); ++r) {
          int32_t last = growth.last_slots[r];
          for (int32_t p = growth.prefix_lens[r]; p < growth.seq_lens[r]; ++p, ++next) {
            hold(slots[next], p % page_size == 0);
            FUZZ_CHECK(slots[next] % page_size == p % page_size);
            FUZZ_CHECK(p % page_size == 0 || slots[next] == last + 1);
            last = slots[next];
          }
        }
        break;
      }
      case 2: {
        const Ints slots = take_slots(input, held, page_size);
        const bool mine = std::all_of(slots.begin(), slots.end(), [&](int32_t slot) { return held.count(slot) > 0; });
        const bool once = std::set<int32_t>(slots.begin(), slots.end()).size() == slots.size();
        const bool done = accepted([&] { allocator.free(slots); });
        FUZZ_CHECK(done == (mine && once));
        for (size_t i = 0; done && i < slots.size(); ++i) {
          const auto [first, end] = held_of(slots[i] / page_size);  // the whole page goes
          held.erase(first, end);
        }
        break;
      }
      default: {
        const int32_t slot = take_usual(input, -1, 40);
        FUZZ_CHECK(allocator.is_held(slot) == (held.count(slot) > 0));
      }
    }
    FUZZ_CHECK(allocator.available() == (num_pages - pages_held()) * page_size);
    allocator.check_invariants();
  }
}

void check_allocators(FuzzInput& input) {
  const int32_t page_size = take_usual(input, 1, 4), pages = input.take_between(0, 9);
  const int64_t slots = int64_t{pages} * page_size + (input.take<uint8_t>() == 255 ? 1 : 0);
  if (page_size > 100 || (page_size > 0 && slots > 100)) return;  // more than this target's sets are for
  const auto num_slots = static_cast<int32_t>(std::clamp<int64_t>(slots, -100, 100));
  if (input.take<uint8_t>() % 2 == 0) {
    std::optional<folio::TokenAllocator> allocator;
    if (accepted([&] { allocator.emplace(num_slots, page_size); })) check_allocator(input, *allocator);
  } else {
    std::optional<folio::WindowTokenAllocator> allocator;
    if (accepted([&] { allocator.emplace(num_slots, num_slots, page_size); })) check_allocator(input, *allocator);
  }
}

void check_rows(FuzzInput& input) {
  std::optional<folio::ReqToTokenPool> pool;
  const int32_t rows = take_usual(input, 1, 5), columns = take_usual(input, 1, 9);
  if (rows > 1000 || columns > 1000) return;
  if (!accepted([&] { pool.emplace(rows, columns); })) {
    FUZZ_CHECK(rows < 1 || columns < 1);
    return;
  }
  std::set<int32_t> held;
  std::vector<Ints> model(static_cast<size_t>(rows) + 1, Ints(static_cast<size_t>(columns), 0));
  for (int calls = input.take_between(1, 12); calls > 0; --calls) {
    const int32_t row = take_usual(input, 0, rows);
    switch (input.take<uint8_t>() % 4) {
      case 0: {
        Ints taken(static_cast<size_t>(input.take<uint8_t>() % 3), -7);
        const bool room = static_cast<int32_t>(taken.size() + held.size()) <= rows;
        FUZZ_CHECK(pool->alloc(taken) == room);
        for (const int32_t fresh : taken)
          FUZZ_CHECK(!room || (fresh >= 1 && fresh <= rows && held.insert(fresh).second));
        break;
      }
      case 1: FUZZ_CHECK(accepted([&] { pool->free(row); }) == (held.erase(row) > 0)); break;
      case 2: {
        const int32_t first = take_usual(input, 0, columns);
        const Ints slots = input.take_lengths(input.take<uint8_t>() % 5, 50);
        const bool fits = first >= 0 && int64_t{first} + static_cast<int64_t>(slots.size()) <= columns;
        const bool done = accepted([&] { pool->write(row, first, slots); });
        FUZZ_CHECK(done == (fits && held.count(row) > 0));
        if (done) std::copy(slots.begin(), slots.end(), model[static_cast<size_t>(row)].begin() + first);
        break;
      }
      default:
        if (accepted([&] { static_cast<void>(pool->row(row)); })) {
          const auto entries = pool->row(row);
          FUZZ_CHECK(std::equal(entries.begin(), entries.end(), model[static_cast<size_t>(row)].begin()));
        } else {
          FUZZ_CHECK(row < 0 || row > rows);
        }
    }
    FUZZ_CHECK(pool->available() == rows - static_cast<int32_t>(held.size()));
  }
}

/// Few tokens, so that sequences begin alike.
Ints take_tokens(FuzzInput& input) {
  Ints tokens(static_cast<size_t>(input.take<uint8_t>() % 14));
  const uint32_t bits = input.take<uint32_t>();
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(bits >> (2 * i % 32) & 1);
  return tokens;
}

void check_prefix_cache(FuzzInput& input) {
  folio::PrefixCacheOptions options;
  options.page_size = take_usual(input, 1, 4);
  options.window_left = input.take<uint8_t>() % 2 == 0 ? -1 : take_usual(input, 1, 6);
  options.whole_leaves = input.take<uint8_t>() % 2 == 0;
  std::optional<folio::PrefixCache> cache;
  if (!accepted([&] { cache.emplace(options); })) {
    FUZZ_CHECK(options.page_size < 1 || options.window_left == 0 || options.window_left < -1);
    return;
  }
  int64_t next_slot = options.page_size;
  int64_t given = 0, back = 0;
  std::vector<folio::PrefixLock> locks;
  for (int calls = input.take_between(1, 12); calls > 0; --calls) {
    const Ints tokens = take_tokens(input);
    folio::SlotChanges changes;
    switch (input.take<uint8_t>() % 5) {
      case 0:
      case 1: {
        Ints slots;
        for (size_t i = 0; i < tokens.size(); ++i) slots.push_back(static_cast<int32_t>(next_slot++ % 100000));
        if (input.take<uint8_t>() > 250) slots.push_back(input.take<int32_t>());
        if (input.take<uint8_t>() > 250 && !slots.empty()) slots[0] = -1;
        const int64_t begin = input.take<uint8_t>() % 8 == 0 ? take_usual(input, 0, 8) : 0;
        const int64_t before = cache->size(), there = cache->match({tokens});
        folio::PrefixCache::Inserted result;
        if (!accepted([&] { result = cache->insert({tokens}, slots, changes, begin); })) {
          FUZZ_CHECK(cache->size() == before && cache->match({tokens}) == there);
          break;
        }
        FUZZ_CHECK(cache->size() == before + result.inserted);
        FUZZ_CHECK(options.window_left >= 0 || result.present == there);
        FUZZ_CHECK((result.present + result.inserted) % options.page_size == 0);
        if (options.window_left < 0) {
          FUZZ_CHECK(cache->match({tokens}) ==
                     static_cast<int64_t>(tokens.size()) / options.page_size * options.page_size);
        }
        given += result.inserted;
        break;
      }
      case 2: {
        Ints slots;
        const int64_t there = cache->match({tokens});
        locks.push_back(cache->acquire({tokens}, slots));
        FUZZ_CHECK(locks.back().length() == there && static_cast<int64_t>(slots.size()) == there);
        break;
      }
      case 3:
        if (!locks.empty()) locks.erase(locks.begin() + input.take<uint8_t>() % static_cast<int>(locks.size()));
        break;
      default: {
        const folio::PrefixCache::Amount wanted = {take_usual(input, 0, 12), input.take<uint8_t>() % 4 == 0 ? 1 : 0};
        const int64_t evictable = cache->evictable();
        folio::PrefixCache::Amount gone;
        if (!accepted([&] { gone = cache->evict(wanted, changes); })) break;
        FUZZ_CHECK(wanted.slots >= 0 && gone.slots >= std::min(wanted.slots, evictable) && gone.slots <= evictable);
        FUZZ_CHECK(static_cast<int64_t>(changes.freed.size()) == gone.slots);
        back += gone.slots;
      }
    }
    cache->check_invariants();
    FUZZ_CHECK(cache->evictable() + cache->protected_slots() == cache->size() && cache->size() == given - back);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  switch (input.take<uint8_t>() % 3) {
    case 0: check_allocators(input); break;
    case 1: check_rows(input); break;
    default: check_prefix_cache(input);
  }
  return 0;
}
