// The prefix cache and the allocator beside it, in C: a request's life, as the C++ class has it.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "c_handles.hpp"
#include "folio/c/folio.h"
#include "folio/kvcache/prefix_cache.hpp"

namespace folio_c_test {
namespace {

using Ints = std::vector<int32_t>;

folio_prefix_key key_of(const Ints& tokens, const std::string& extra = {}) {
  return {tokens.data(), static_cast<int64_t>(tokens.size()), extra.empty() ? nullptr : extra.data(), extra.size()};
}

Owned<folio_slot_changes> make_changes() {
  return make<folio_slot_changes>([](folio_slot_changes** changes) { return folio_create_slot_changes(changes); });
}

Owned<folio_prefix_cache> make_cache(const folio_prefix_cache_options* options) {
  return make<folio_prefix_cache>(
      [&](folio_prefix_cache** cache) { return folio_create_prefix_cache(options, cache); });
}

Ints freed(const folio_slot_changes* changes) {
  const int32_t* slots = nullptr;
  int64_t count = -1;
  EXPECT_EQ(folio_slot_changes_freed(changes, &slots, &count), FOLIO_OK);
  return count > 0 ? Ints(slots, slots + count) : Ints();
}

folio_prefix_cache_sizes sizes_of(const folio_prefix_cache* cache) {
  folio_prefix_cache_sizes sizes = FOLIO_PREFIX_CACHE_SIZES_INIT;
  EXPECT_EQ(folio_prefix_cache_get_sizes(cache, &sizes), FOLIO_OK) << folio_last_error();
  return sizes;
}

TEST(CPrefixCache, TheLifeOfARequest) {
  folio_prefix_cache_options options = FOLIO_PREFIX_CACHE_OPTIONS_INIT;
  options.page_size = 2;
  const auto owned = make_cache(&options);
  folio_prefix_cache* cache = owned.get();
  folio::PrefixCache cpp({.page_size = 2});
  const auto changes = make_changes();
  folio::SlotChanges cpp_changes;

  const Ints prompt = {1, 2, 3, 4, 5}, slots = {10, 11, 12, 13, 14};
  const folio_prefix_key prompt_key = key_of(prompt);
  int64_t present = -1, inserted = -1;
  ASSERT_EQ(folio_prefix_cache_insert(cache, &prompt_key, slots.data(), 0, changes.get(), &present, &inserted),
            FOLIO_OK)
      << folio_last_error();
  EXPECT_EQ((folio::PrefixCache::Inserted{present, inserted}), cpp.insert({prompt}, slots, cpp_changes));
  int64_t matched = -1;
  ASSERT_EQ(folio_prefix_cache_match(cache, &prompt_key, &matched), FOLIO_OK);
  EXPECT_EQ(matched, 4);
  const folio_prefix_key other = key_of(prompt, "adapter 7");
  ASSERT_EQ(folio_prefix_cache_match(cache, &other, &matched), FOLIO_OK);
  EXPECT_EQ(matched, 0);

  // Another request with the same beginning takes the slots, computes the rest and inserts it.
  Ints all = {1, 2, 3, 4, 8, 9, 7}, own(7, -1), cpp_own;
  folio_prefix_key key = key_of(all);
  folio_prefix_lock* lock = nullptr;
  ASSERT_EQ(folio_prefix_cache_acquire(cache, &key, own.data(), &lock), FOLIO_OK) << folio_last_error();
  folio::PrefixLock cpp_lock = cpp.acquire({all}, cpp_own);
  int64_t length = -1;
  ASSERT_EQ(folio_prefix_lock_length(lock, &length), FOLIO_OK);
  EXPECT_EQ(length, cpp_lock.length());
  EXPECT_EQ(Ints(own.begin(), own.begin() + 4), (Ints{10, 11, 12, 13}));
  EXPECT_EQ(own[4], -1);
  std::iota(own.begin() + 4, own.end(), 20);
  cpp_own = own;
  ASSERT_EQ(folio_prefix_cache_extend(cache, lock, &key, own.data(), 0, changes.get()), FOLIO_OK) << folio_last_error();
  cpp.extend(cpp_lock, {all}, cpp_own, cpp_changes);
  EXPECT_EQ(own, cpp_own);
  EXPECT_EQ(sizes_of(cache).protected_slots, cpp.protected_slots());
  EXPECT_EQ(folio_prefix_cache_clear(cache), FOLIO_INVALID_ARGUMENT);

  // The end: what is no whole page is freed.
  ASSERT_EQ(folio_prefix_cache_finish(cache, lock, &key, own.data(), 0, changes.get()), FOLIO_OK) << folio_last_error();
  cpp.finish(std::move(cpp_lock), {all}, cpp_own, cpp_changes);
  EXPECT_EQ(freed(changes.get()), cpp_changes.freed);
  EXPECT_EQ(freed(changes.get()), (Ints{22}));
  EXPECT_EQ(sizes_of(cache).size, cpp.size());
  EXPECT_EQ(sizes_of(cache).num_nodes, cpp.num_nodes());
  EXPECT_EQ(sizes_of(cache).protected_slots, 0);

  ASSERT_EQ(folio_slot_changes_clear(changes.get()), FOLIO_OK);
  cpp_changes.clear();
  int64_t gone = -1;
  ASSERT_EQ(folio_prefix_cache_evict(cache, 2, 0, changes.get(), &gone, nullptr), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(gone, cpp.evict({.slots = 2}, cpp_changes).slots);
  EXPECT_EQ(freed(changes.get()), cpp_changes.freed);
  ASSERT_EQ(folio_prefix_cache_clear(cache), FOLIO_OK);
  EXPECT_EQ(sizes_of(cache).size, 0);
}

TEST(CPrefixCache, LocksOutliveTheCache_AndFinishFreesThemWhateverHappens) {
  auto cache = make_cache(nullptr);
  const Ints tokens = {1, 2, 3};
  const folio_prefix_key key = key_of(tokens);
  Ints slots = {4, 5, 6};
  folio_prefix_lock* lock = nullptr;
  const auto changes = make_changes();
  ASSERT_EQ(folio_prefix_cache_insert(cache.get(), &key, slots.data(), 0, changes.get(), nullptr, nullptr), FOLIO_OK);
  ASSERT_EQ(folio_prefix_cache_acquire(cache.get(), &key, slots.data(), &lock), FOLIO_OK);
  EXPECT_EQ(folio_prefix_cache_clear(cache.get()), FOLIO_INVALID_ARGUMENT) << "a lock lives";
  expect_null_refused(folio_prefix_cache_finish(cache.get(), lock, &key, slots.data(), 0, nullptr), "changes");
  ASSERT_EQ(folio_prefix_cache_clear(cache.get()), FOLIO_OK) << "the refused call has freed the lock";
  ASSERT_EQ(folio_prefix_cache_acquire(cache.get(), &key, slots.data(), &lock), FOLIO_OK);
  cache.reset();
  folio_free_prefix_lock(lock);
}

TEST(CPrefixCache, WindowCopiesAreAppliedToTheAllocator) {
  const auto allocator = make<folio_window_token_allocator>(
      [](folio_window_token_allocator** made) { return folio_create_window_token_allocator(32, 16, 1, made); });
  folio_prefix_cache_options options = FOLIO_PREFIX_CACHE_OPTIONS_INIT;
  options.window_left = 2;
  const auto cache = make_cache(&options);
  const auto changes = make_changes();
  const Ints tokens = {1, 2, 3, 4, 5, 6};
  const folio_prefix_key key = key_of(tokens);
  Ints slots(6), window(6), again(6);
  int32_t allocated = 0, free_slots = 0, free_window = 0;
  ASSERT_EQ(folio_window_token_allocator_alloc(allocator.get(), slots.data(), 6, &allocated), FOLIO_OK);
  ASSERT_EQ(allocated, 1);
  // The first three have left the window.
  ASSERT_EQ(folio_window_token_allocator_free_window(allocator.get(), slots.data(), 3), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(folio_window_token_allocator_available(allocator.get(), &free_slots, &free_window), FOLIO_OK);
  EXPECT_EQ(free_slots, 26);
  EXPECT_EQ(free_window, 13);
  ASSERT_EQ(folio_window_token_allocator_to_window(allocator.get(), slots.data(), 6, window.data()), FOLIO_OK);
  EXPECT_EQ(window[0], 0);
  EXPECT_NE(window[5], 0);
  ASSERT_EQ(folio_prefix_cache_insert(cache.get(), &key, slots.data(), 3, changes.get(), nullptr, nullptr), FOLIO_OK)
      << folio_last_error();
  EXPECT_EQ(sizes_of(cache.get()).window_size, 3);
  // A second request brings window copies for the tombstones: they are moved.
  ASSERT_EQ(folio_window_token_allocator_alloc(allocator.get(), again.data(), 6, &allocated), FOLIO_OK);
  ASSERT_EQ(folio_prefix_cache_insert(cache.get(), &key, again.data(), 0, changes.get(), nullptr, nullptr), FOLIO_OK)
      << folio_last_error();
  const folio_slot_move* moves = nullptr;
  int64_t num_moves = 0;
  ASSERT_EQ(folio_slot_changes_moved(changes.get(), &moves, &num_moves), FOLIO_OK);
  ASSERT_EQ(num_moves, 3);
  EXPECT_EQ(moves[0].from, again[0]);
  EXPECT_EQ(moves[0].to, slots[0]);
  ASSERT_EQ(folio_window_token_allocator_apply(allocator.get(), changes.get()), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(folio_window_token_allocator_to_window(allocator.get(), slots.data(), 6, window.data()), FOLIO_OK);
  EXPECT_NE(window[0], 0);
  ASSERT_EQ(folio_slot_changes_clear(changes.get()), FOLIO_OK);
  int64_t gone = -1;
  ASSERT_EQ(folio_prefix_cache_evict(cache.get(), 0, 2, changes.get(), nullptr, &gone), FOLIO_OK) << folio_last_error();
  EXPECT_GE(gone, 2);
  const int32_t* window_freed = nullptr;
  int64_t num_freed = 0;
  ASSERT_EQ(folio_slot_changes_window_freed(changes.get(), &window_freed, &num_freed), FOLIO_OK);
  ASSERT_EQ(folio_window_token_allocator_apply(allocator.get(), changes.get()), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(folio_window_token_allocator_clear(allocator.get()), FOLIO_OK);
}

TEST(CPrefixCache, BadArguments) {
  const auto cache = make_cache(nullptr);
  const auto changes = make_changes();
  const Ints tokens = {1, 2};
  folio_prefix_key key = key_of(tokens);
  Ints slots = {5, 6};
  folio_prefix_lock* lock = nullptr;
  folio_prefix_cache* none = nullptr;
  int64_t number = -7;
  expect_null_refused(folio_create_prefix_cache(nullptr, nullptr), "cache");
  folio_prefix_cache_options options = FOLIO_PREFIX_CACHE_OPTIONS_INIT;
  options.page_size = -1;
  expect_refusal(folio_create_prefix_cache(&options, &none), FOLIO_INVALID_ARGUMENT, "page_size");
  EXPECT_EQ(none, nullptr);
  expect_null_refused(folio_prefix_cache_match(nullptr, &key, &number), "cache");
  expect_null_refused(folio_prefix_cache_match(cache.get(), nullptr, &number), "key");
  expect_null_refused(folio_prefix_cache_match(cache.get(), &key, nullptr), "num_tokens");
  expect_null_refused(folio_prefix_cache_acquire(cache.get(), &key, nullptr, &lock), "slots");
  expect_null_refused(folio_prefix_cache_acquire(cache.get(), &key, slots.data(), nullptr), "lock");
  expect_null_refused(folio_prefix_cache_extend(cache.get(), nullptr, &key, slots.data(), 0, changes.get()), "lock");
  expect_null_refused(folio_prefix_cache_finish(cache.get(), nullptr, &key, slots.data(), 0, changes.get()), "lock");
  expect_null_refused(folio_prefix_cache_insert(cache.get(), &key, nullptr, 0, changes.get(), nullptr, nullptr),
                      "slots");
  EXPECT_EQ(folio_prefix_cache_insert(cache.get(), &key, slots.data(), 1, changes.get(), nullptr, nullptr),
            FOLIO_INVALID_ARGUMENT);
  slots[1] = -1;
  EXPECT_EQ(folio_prefix_cache_insert(cache.get(), &key, slots.data(), 0, changes.get(), nullptr, nullptr),
            FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(folio_prefix_cache_evict(cache.get(), -1, 0, changes.get(), nullptr, nullptr), FOLIO_INVALID_ARGUMENT);
  key.num_tokens = -2;
  expect_refusal(folio_prefix_cache_match(cache.get(), &key, &number), FOLIO_INVALID_ARGUMENT,
                 "key.tokens has -2 elements");
  key = key_of(tokens);
  key.extra_key_bytes = 3;
  expect_null_refused(folio_prefix_cache_match(cache.get(), &key, &number), "key.extra_key");
  const int32_t* data = nullptr;
  expect_null_refused(folio_slot_changes_freed(nullptr, &data, &number), "changes");
  expect_null_refused(folio_slot_changes_freed(changes.get(), nullptr, &number), "slots");
  expect_null_refused(folio_slot_changes_moved(changes.get(), nullptr, &number), "moves");
  folio_prefix_cache_sizes sizes = FOLIO_PREFIX_CACHE_SIZES_INIT;
  sizes.struct_size = 0;
  expect_refusal(folio_prefix_cache_get_sizes(cache.get(), &sizes), FOLIO_INVALID_ARGUMENT,
                 "folio_prefix_cache_sizes_init");
  EXPECT_EQ(number, -7);
  EXPECT_EQ(lock, nullptr);
}

}  // namespace
}  // namespace folio_c_test
