#include "folio/kvcache/prefix_cache.hpp"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "capi/convert.hpp"

using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_span;

struct folio_prefix_cache {
  folio::PrefixCache cache;
};

struct folio_prefix_lock {
  folio::PrefixLock lock;
};

namespace {

folio::PrefixKey to_key(const folio_prefix_key* key) {
  const folio_prefix_key& given = deref(key, "key");
  folio::core::require(given.extra_key != nullptr || given.extra_key_bytes == 0, "key.extra_key is null, but has ",
                       given.extra_key_bytes, " bytes");
  folio::PrefixKey converted;
  converted.tokens = to_span(given.tokens, given.num_tokens, "key.tokens");
  if (given.extra_key != nullptr) converted.extra_key = std::string_view(given.extra_key, given.extra_key_bytes);
  return converted;
}

folio::SlotChanges& to_changes(folio_slot_changes* changes) {
  return deref(changes, "changes").changes;
}

/// Gives a vector's elements out; CElement has its layout (layout.cc).
template <typename Element, typename CElement>
void give_array(const std::vector<Element>& elements, const CElement** data, int64_t* count, const char* data_name,
                const char* count_name) {
  deref(data, data_name);
  deref(count, count_name) = static_cast<int64_t>(elements.size());
  *data = reinterpret_cast<const CElement*>(elements.data());
}

const folio::SlotChanges& to_changes(const folio_slot_changes* changes) {
  return deref(changes, "changes").changes;
}

}  // namespace

folio_status folio_create_slot_changes(folio_slot_changes** changes) noexcept {
  return guarded([&] {
    deref(changes, "changes") = nullptr;
    *changes = new folio_slot_changes();
  });
}

void folio_free_slot_changes(folio_slot_changes* changes) noexcept {
  delete changes;
}

folio_status folio_slot_changes_clear(folio_slot_changes* changes) noexcept {
  return guarded([&] { to_changes(changes).clear(); });
}

folio_status folio_slot_changes_freed(const folio_slot_changes* changes, const int32_t** slots,
                                      int64_t* num_slots) noexcept {
  return guarded([&] { give_array(to_changes(changes).freed, slots, num_slots, "slots", "num_slots"); });
}

folio_status folio_slot_changes_window_freed(const folio_slot_changes* changes, const int32_t** slots,
                                             int64_t* num_slots) noexcept {
  return guarded([&] { give_array(to_changes(changes).window_freed, slots, num_slots, "slots", "num_slots"); });
}

folio_status folio_slot_changes_moved(const folio_slot_changes* changes, const folio_slot_move** moves,
                                      int64_t* num_moves) noexcept {
  return guarded([&] { give_array(to_changes(changes).moved, moves, num_moves, "moves", "num_moves"); });
}

folio_status folio_create_prefix_cache(const folio_prefix_cache_options* options, folio_prefix_cache** cache) noexcept {
  return guarded([&] {
    deref(cache, "cache") = nullptr;
    folio::PrefixCacheOptions converted;
    if (options != nullptr) {
      const folio_prefix_cache_options given = folio::capi::read_struct(options, "options");
      if (given.page_size != 0) converted.page_size = given.page_size;
      if (given.window_left != 0) converted.window_left = given.window_left;
      converted.whole_leaves = given.partial_leaves == 0;
    }
    *cache = new folio_prefix_cache{folio::PrefixCache(converted)};
  });
}

void folio_free_prefix_cache(folio_prefix_cache* cache) noexcept {
  delete cache;
}

folio_status folio_prefix_cache_get_sizes(const folio_prefix_cache* cache, folio_prefix_cache_sizes* sizes) noexcept {
  return guarded([&] {
    const folio::PrefixCache& tree = deref(cache, "cache").cache;
    const folio_prefix_cache_sizes values = {0,
                                             0,
                                             tree.size(),
                                             tree.evictable(),
                                             tree.protected_slots(),
                                             tree.window_size(),
                                             tree.window_evictable(),
                                             tree.window_protected(),
                                             tree.num_nodes()};
    folio::capi::write_struct(sizes, values, "sizes");
  });
}

folio_status folio_prefix_cache_match(const folio_prefix_cache* cache, const folio_prefix_key* key,
                                      int64_t* num_tokens) noexcept {
  return guarded([&] {
    deref(cache, "cache");
    deref(num_tokens, "num_tokens");
    *num_tokens = cache->cache.match(to_key(key));
  });
}

folio_status folio_prefix_cache_acquire(folio_prefix_cache* cache, const folio_prefix_key* key, int32_t* slots,
                                        folio_prefix_lock** lock) noexcept {
  return guarded([&] {
    deref(lock, "lock") = nullptr;
    deref(cache, "cache");
    const folio::PrefixKey tokens = to_key(key);
    const auto room = to_span(slots, static_cast<int64_t>(tokens.tokens.size()), "slots");
    std::vector<int32_t> found;
    auto acquired = std::make_unique<folio_prefix_lock>();
    acquired->lock = cache->cache.acquire(tokens, found);
    std::copy(found.begin(), found.end(), room.begin());
    *lock = acquired.release();
  });
}

folio_status folio_prefix_cache_insert(folio_prefix_cache* cache, const folio_prefix_key* key, const int32_t* slots,
                                       int64_t window_begin, folio_slot_changes* changes, int64_t* present,
                                       int64_t* inserted) noexcept {
  return guarded([&] {
    deref(cache, "cache");
    const folio::PrefixKey tokens = to_key(key);
    const folio::PrefixCache::Inserted done = cache->cache.insert(
        tokens, to_span(slots, static_cast<int64_t>(tokens.tokens.size()), "slots"), to_changes(changes), window_begin);
    if (present != nullptr) *present = done.present;
    if (inserted != nullptr) *inserted = done.inserted;
  });
}

folio_status folio_prefix_cache_extend(folio_prefix_cache* cache, folio_prefix_lock* lock, const folio_prefix_key* key,
                                       int32_t* slots, int64_t window_begin, folio_slot_changes* changes) noexcept {
  return guarded([&] {
    deref(cache, "cache");
    const folio::PrefixKey tokens = to_key(key);
    cache->cache.extend(deref(lock, "lock").lock, tokens,
                        to_span(slots, static_cast<int64_t>(tokens.tokens.size()), "slots"), to_changes(changes),
                        window_begin);
  });
}

folio_status folio_prefix_cache_finish(folio_prefix_cache* cache, folio_prefix_lock* lock, const folio_prefix_key* key,
                                       const int32_t* slots, int64_t window_begin,
                                       folio_slot_changes* changes) noexcept {
  const std::unique_ptr<folio_prefix_lock> taken(lock);  // whatever becomes of the call
  return guarded([&] {
    deref(cache, "cache");
    const folio::PrefixKey tokens = to_key(key);
    folio::SlotChanges& list = to_changes(changes);
    const auto own = to_span(slots, static_cast<int64_t>(tokens.tokens.size()), "slots");
    cache->cache.finish(std::move(deref(taken.get(), "lock").lock), tokens, own, list, window_begin);
  });
}

folio_status folio_prefix_cache_evict(folio_prefix_cache* cache, int64_t slots, int64_t window_copies,
                                      folio_slot_changes* changes, int64_t* evicted_slots,
                                      int64_t* evicted_window_copies) noexcept {
  return guarded([&] {
    deref(cache, "cache");
    const folio::PrefixCache::Amount gone = cache->cache.evict({slots, window_copies}, to_changes(changes));
    if (evicted_slots != nullptr) *evicted_slots = gone.slots;
    if (evicted_window_copies != nullptr) *evicted_window_copies = gone.window_copies;
  });
}

folio_status folio_prefix_cache_clear(folio_prefix_cache* cache) noexcept {
  return guarded([&] { deref(cache, "cache").cache.clear(); });
}

folio_status folio_prefix_lock_length(const folio_prefix_lock* lock, int64_t* num_tokens) noexcept {
  return guarded([&] {
    deref(lock, "lock");
    deref(num_tokens, "num_tokens") = lock->lock.length();
  });
}

void folio_free_prefix_lock(folio_prefix_lock* lock) noexcept {
  delete lock;
}
