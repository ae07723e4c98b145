#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace folio::replay {

/// Hands out the pages of a KV cache: reference counts, sharing of equal prefixes, LRU eviction.
///
/// A page is free (no content), held (referenced by requests) or cached (published under a key, referenced by none,
/// kept until its memory is needed). Only full pages are published; their key is the token chain's value at their last
/// token, so equal keys mean equal contents from the sequence's beginning on. One manager serves all layers: page p is
/// page p of each. Misuse (releasing what is not held, publishing twice) throws folio::Error(kInternal). Not
/// thread-safe.
class PageManager {
 public:
  /// `reuse` false: nothing is ever published. Throws kInvalidArgument for num_pages < 1.
  PageManager(int32_t num_pages, bool reuse);

  int32_t num_pages() const { return static_cast<int32_t>(pages_.size()); }
  int32_t available() const { return free_count_ + cached_count_; }  ///< pages that `allocate` could give now
  int32_t held() const { return num_pages() - available(); }
  int32_t cached() const { return cached_count_; }
  int64_t evictions() const { return evictions_; }

  /// Takes a reference on every page of the longest published prefix of `keys` and appends them to `pages`.
  /// Returns how many. O(pages found).
  int32_t acquire_prefix(std::span<const uint64_t> keys, std::vector<int32_t>& pages);

  /// Appends `count` fresh pages, each with one reference, evicting cached ones from the least recently used on.
  /// All or nothing: false and no change if fewer are available.
  bool allocate(int32_t count, std::vector<int32_t>& pages);

  /// Makes a held page findable under `key`. If another page has the key already, that one stays and this one remains
  /// private.
  void publish(int32_t page, uint64_t key);

  /// Drops one reference of each page. The last page is dropped first, so that of a sequence its end is evicted first.
  void release(std::span<const int32_t> pages);

  /// Forgets all cached pages: they become free.
  void drop_cache();

 private:
  static constexpr int32_t kNone = -1;
  struct Page {
    int32_t references = 0;
    int32_t older = kNone;  ///< LRU list of cached pages; `newer` also links the free list
    int32_t newer = kNone;
    bool published = false;
    uint64_t key = 0;
  };
  Page& at(int32_t page);
  void push_free(int32_t page);
  void unlink(int32_t page);
  void evict_oldest();

  std::vector<Page> pages_;
  std::unordered_map<uint64_t, int32_t> by_key_;
  bool reuse_;
  int32_t first_free_ = kNone;
  int32_t oldest_ = kNone;
  int32_t newest_ = kNone;
  int32_t free_count_ = 0;
  int32_t cached_count_ = 0;
  int64_t evictions_ = 0;
};

}  // namespace folio::replay
