#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "folio/kvcache/prefix_cache.hpp"

namespace folio::inline v0::detail {

/// (used, node): least recently used first.
using PrefixList = std::set<std::pair<uint64_t, int32_t>>;

/// A run of tokens that follows its parent's, with one slot a token. Roots (one an extra key) have no tokens.
struct PrefixNode {
  std::vector<int32_t> tokens;
  std::vector<int32_t> slots;
  int32_t parent = -1;
  int32_t num_children = 0;
  int32_t locks = 0;         ///< paths of locks that lead through this node
  int32_t window_locks = 0;  ///< of these, those whose last window_left tokens reach into it
  uint64_t used = 0;         ///< the tree's clock at its last use; later for nodes further from the root
  uint64_t leaf_since = 0;   ///< the time under which it is in `leaves`; 0 = it is not
  uint64_t window_since = 0;
  PrefixList::node_type leaf_entry, window_entry;  ///< of the lists that it is not in: entering one allocates nothing
  const std::string* extra_key = nullptr;          ///< of a root
  bool tombstone = false;                          ///< its slots have no window copies
  bool live = false;

  int64_t size() const noexcept { return static_cast<int64_t>(tokens.size()); }
};

/// Where a search ended: at the end of `node`, `length` tokens from the beginning, or `inner_length` tokens into its
/// child `inner`.
struct PrefixPosition {
  int32_t node = -1;
  int64_t length = 0;
  int32_t inner = -1;
  int64_t inner_length = 0;
  int64_t total() const noexcept { return length + inner_length; }
};

/// Room for `more` elements, which are then appended without an allocation; grows as push_back does.
template <typename T>
void make_room(std::vector<T>& values, size_t more) {
  if (values.capacity() - values.size() < more) values.reserve(std::max(2 * values.capacity(), values.size() + more));
}

/// The tree behind PrefixCache and its locks. Nodes are numbers: a split gives the upper part a new one, so that what
/// points to the end of a node still does. Nothing is checked here; prefix_cache.cc does. A call for which there is no
/// memory throws with the tree as it was.
struct PrefixTree {
  static constexpr int32_t kNone = -1;
  using List = PrefixList;

  explicit PrefixTree(const PrefixCacheOptions& chosen) : options(chosen) {}

  bool windowed() const noexcept { return options.window_left >= 0; }
  PrefixNode& at(int32_t node) { return nodes[static_cast<size_t>(node)]; }
  const PrefixNode& at(int32_t node) const { return nodes[static_cast<size_t>(node)]; }
  bool is_root(int32_t node) const { return at(node).parent == kNone; }

  std::span<const int32_t> whole_pages(std::span<const int32_t> tokens) const {
    return tokens.first(tokens.size() - tokens.size() % static_cast<size_t>(options.page_size));
  }

  int32_t find_root(std::string_view extra_key) const;
  int32_t find_child(int32_t parent, std::span<const int32_t> tokens) const;
  /// Leading tokens that are equal, in whole pages.
  int64_t common(const PrefixNode& node, std::span<const int32_t> tokens) const;
  /// The end of the longest prefix that may be used: with a window, one whose last tokens have window copies.
  PrefixPosition find(int32_t root, std::span<const int32_t> tokens) const;

  int32_t add_root(std::string_view extra_key);
  void drop_root(int32_t root) noexcept;  ///< which has no children
  int32_t add_leaf(int32_t parent, std::span<const int32_t> tokens, std::span<const int32_t> slots, bool tombstone);
  /// Cuts a node; returns the new one, which has its first `length` tokens. Both have the same locks.
  int32_t split(int32_t node, int64_t length);
  /// Takes a leaf out, and tombstones above it that become leaves by that.
  PrefixCache::Amount remove_leaf(int32_t node, SlotChanges& changes);
  /// Takes the last `slots` of a leaf, whole pages but not all of them.
  PrefixCache::Amount cut_leaf(int32_t node, int64_t slots, SlotChanges& changes);
  void make_tombstone(int32_t node, SlotChanges& changes);
  void give_window_copies(int32_t node) noexcept;

  void touch(int32_t node) noexcept;
  void touch_path(int32_t node);

  /// Locks the path that ends `length` tokens from the beginning at `node`; returns where its window locks begin.
  int64_t lock(int32_t node, int64_t length) noexcept;
  void unlock(int32_t node, int64_t length, int64_t window_begin) noexcept;

  void check() const;      ///< throws kInternal
  void check_sometimes();  ///< in debug builds, so that it costs a constant share of the calls

  PrefixCacheOptions options;
  std::vector<PrefixNode> nodes;
  std::vector<int32_t> free_nodes;
  std::map<std::string, int32_t, std::less<>> roots;
  std::unordered_multimap<uint64_t, int32_t> children;  ///< by hash of parent and first page
  List leaves;                                          ///< leaves that no lock keeps
  List window_list;  ///< nodes whose window copies can go: not locked, and not of a leaf that is
  uint64_t clock = 0;
  int64_t evictable = 0;
  int64_t locked = 0;
  int64_t window_evictable = 0;
  int64_t window_locked = 0;
  int64_t num_locks = 0;
  int64_t num_nodes = 0;  ///< without roots
  int64_t calls_since_check = 0;
  std::vector<int32_t> path;  ///< scratch of touch_path

 private:
  uint64_t child_hash(int32_t parent, const int32_t* page) const;
  void index(int32_t node);
  void unindex(int32_t node);
  int32_t new_node();
  void drop_node(int32_t node) noexcept;
  void enlist(int32_t node) noexcept;
  void count_window(const PrefixNode& node, int64_t sign);
};

}  // namespace folio::inline v0::detail
