#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "folio/kvcache/slot_changes.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0 {

namespace detail {
struct PrefixTree;
}

/// A request's tokens, for finding and keeping their slots. Entries with different extra keys (an adapter's id, a salt,
/// an image's hash) share nothing. Borrowed for the call.
struct PrefixKey {
  std::span<const int32_t> tokens;
  std::string_view extra_key = {};
};

struct PrefixCacheOptions {
  int32_t page_size = 1;     ///< prefixes are kept and matched in whole pages of so many tokens; >= 1
  int32_t window_left = -1;  ///< -1: no window. Else >= 1: layers with that window have copies of their own (below)
  bool whole_leaves = true;  ///< as in SGLang; false: of the last leaf that has to go for its slots, only the end goes
};

/// Keeps a path of the prefix cache from being evicted, for as long as it lives. Move-only; may outlive the cache.
class FOLIO_API PrefixLock {
 public:
  PrefixLock() noexcept;
  PrefixLock(PrefixLock&& other) noexcept;
  PrefixLock& operator=(PrefixLock&& other) noexcept;
  ~PrefixLock();

  int64_t length() const noexcept { return length_; }  ///< tokens from the beginning on that it keeps
  void reset() noexcept;                               ///< gives the path up; O(nodes of the path)

 private:
  friend class PrefixCache;
  std::shared_ptr<detail::PrefixTree> tree_;
  int32_t node_ = -1;
  int64_t length_ = 0;
  int64_t window_begin_ = 0;  ///< where the part of the path begins whose window copies it keeps
};

/// A radix tree over the token sequences whose keys and values are in the KV pool, so that requests with equal
/// beginnings share slots. The life of a request (`all` are its tokens so far, `slots` theirs):
///
///     // 1. What is there, kept from now on. All but the last token: one must be left to compute.
///     PrefixLock lock = cache.acquire({all.first(all.size() - 1)}, slots);
///     // 2. Slots for the rest, after the lock, so that an eviction cannot take what was matched.
///     slots.resize(all.size());
///     const auto fresh = std::span(slots).subspan(lock.length());
///     if (!allocator.alloc(fresh)) {
///       cache.evict({.slots = num_missing}, changes);
///       allocator.free(changes.freed);
///       changes.clear();
///       ... alloc again ...
///     }
///     ... compute tokens lock.length() on and write them into `fresh` ...
///     // 3. Others may share the prompt from now on. Some of `slots` may now be the tree's: write them back.
///     cache.extend(lock, {all}, slots, changes);
///     rows.write(row, 0, slots);
///     allocator.free(changes.freed);
///     changes.clear();
///     ... decode: a token and a slot a step ...
///     // 4. The end: everything goes to the tree or is freed.
///     cache.finish(std::move(lock), {all}, slots, changes);
///     allocator.free(changes.freed);
///
/// - **Ownership.** Slots that were handed over belong to the tree until they come back as SlotChanges::freed. Of a
///   request's slots, [0, lock.length()) are the tree's, the others its own.
/// - **Pages.** Only whole pages are kept; what lies behind the last one stays the request's (`finish` frees it).
///   Prefixes that end inside a page do not match there.
/// - **A match is exact**: tokens are compared, not hashes.
/// - **Eviction** takes the least recently used leaves first, where use is an acquire, insert, extend or finish that
///   passed through (not match); the end of a path before its beginning. Whole leaves are taken, so it may take more
///   than was asked for; with PrefixCacheOptions::whole_leaves off no page more, which keeps what a cache of pages
///   would keep. Paths that a lock keeps stay. The order depends on nothing but the calls.
/// - **Without memory** a call throws std::bad_alloc, and the tree is whole. Nobody's slots have changed hands but
///   window copies that SlotChanges::moved names and slots that an eviction has freed. Giving up a lock never fails.
/// - **Always**: evictable() + protected_slots() == size(). Debug builds check_invariants() every so often.
///
/// With a window, the layers that have one keep copies of their own in a pool of their own (WindowTokenAllocator), and
/// the tree knows which slots still have a *window copy*. Eviction can take the window copies of a path and keep the
/// rest (a tombstone). A prefix of n tokens matches only if its last min(n, window_left) tokens have window copies.
/// Only those are kept by a lock; a leaf always has them. A request that walks over a tombstone with window copies of
/// its own hands those over (SlotChanges::moved), so that the tree's slots stay the same for all that use them.
///
/// One cache per thread: no call is thread-safe, destroying locks included. Tokens and slots are int32; times: a call
/// is O(tokens + nodes passed * log(leaves)) beside what it appends. Semantics after SGLang's radix cache; see
/// docs/decisions/0020-pools-and-prefix-cache.md for what differs.
class FOLIO_API PrefixCache {
 public:
  /// Throws kInvalidArgument for a page_size below 1 and a window_left that is neither -1 nor 1 or more.
  explicit PrefixCache(const PrefixCacheOptions& options = {});
  ~PrefixCache();
  PrefixCache(PrefixCache&&) noexcept;
  PrefixCache& operator=(PrefixCache&&) noexcept;

  const PrefixCacheOptions& options() const noexcept;

  int64_t size() const noexcept;             ///< slots in the tree
  int64_t evictable() const noexcept;        ///< of these, slots that no lock keeps
  int64_t protected_slots() const noexcept;  ///< of these, slots that locks keep
  int64_t window_size() const noexcept;      ///< slots in the tree with a window copy
  int64_t window_evictable() const noexcept;
  int64_t window_protected() const noexcept;
  int64_t num_nodes() const noexcept;

  /// Tokens of the longest prefix of `key` that is there. Changes nothing, not even what was used when.
  int64_t match(const PrefixKey& key) const;

  /// Appends the slots of the longest prefix that is there to `slots` and keeps it. To have a token left to compute,
  /// pass all but the last.
  PrefixLock acquire(const PrefixKey& key, std::vector<int32_t>& slots);

  struct Inserted {
    int64_t present = 0;   ///< leading tokens that were there: their slots in the call stay the caller's
    int64_t inserted = 0;  ///< tokens after these whose slots are now the tree's
    friend bool operator==(const Inserted&, const Inserted&) = default;
  };

  /// Hands over slots[i] of tokens[i], in whole pages, where the tree has none. The slots of tokens that were present
  /// are left alone, those behind the last whole page too. In a windowed cache all slots must have window copies from
  /// `window_begin` (a multiple of page_size) on and none before; tokens before it become tombstones, and copies for
  /// tombstones on the way are moved into the tree. Throws kInvalidArgument for numbers of tokens and slots that
  /// differ, for negative slots and for a window_begin that is out of range or not 0 without a window; nothing is then
  /// changed.
  Inserted insert(const PrefixKey& key, std::span<const int32_t> slots, SlotChanges& changes, int64_t window_begin = 0);

  /// A running request's tokens so far. Hands over its whole pages from lock.length() on; where another request has
  /// done so meanwhile, the tree's slots replace the request's in `slots`, and the request's go to changes.freed.
  /// `lock` moves to the end of what is now the tree's. slots[0, lock.length()) must be the tree's, as they are if
  /// `slots` were written back after the last call. A request whose window copies end before its last whole page hands
  /// over nothing. Throws as insert does, and kInvalidArgument for a lock of another cache, tokens or slots that are
  /// not the lock's.
  void extend(PrefixLock& lock, const PrefixKey& key, std::span<int32_t> slots, SlotChanges& changes,
              int64_t window_begin = 0);

  /// The end of a request: as extend, then gives up the lock; all slots that are not the tree's go to changes.freed. A
  /// request that is not worth keeping is ended with lock.reset(), and its slots from lock.length() on are freed.
  void finish(PrefixLock lock, const PrefixKey& key, std::span<const int32_t> slots, SlotChanges& changes,
              int64_t window_begin = 0);

  struct Amount {
    int64_t slots = 0;
    int64_t window_copies = 0;  ///< windowed caches only
    friend bool operator==(const Amount&, const Amount&) = default;
  };

  /// Evicts at least as much as `wanted`, or all that no lock keeps. Leaves go until enough slots are free (their
  /// window copies count), then the least recently used window copies. Returns what went. O(slots that go + leaves
  /// passed * log(leaves)). Throws kInvalidArgument for negative amounts, and for window copies of a cache without a
  /// window.
  Amount evict(const Amount& wanted, SlotChanges& changes);

  /// Forgets everything; the slots are not given back (clear the allocator too). Throws kInvalidArgument while locks
  /// live.
  void clear();

  /// Throws kInternal and says what is wrong if a count, link or rule of the tree is broken. O(size log size).
  void check_invariants() const;

 private:
  void lock_end(PrefixLock& lock, int32_t node, int64_t length);
  void check_lock(const PrefixLock& lock, const PrefixKey& key, std::span<const int32_t> slots) const;

  std::shared_ptr<detail::PrefixTree> tree_;
};

}  // namespace folio::inline v0
