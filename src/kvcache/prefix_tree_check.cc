#include <algorithm>

#include "core/error.hpp"
#include "kvcache/prefix_tree.hpp"

namespace folio::inline v0::detail {
namespace {

template <typename... Parts>
void expect(bool holds, const Parts&... parts) {
  if (!holds) core::fail(ErrorCode::kInternal, "the prefix tree is broken: ", parts...);
}

struct Sums {
  int64_t evictable = 0, locked = 0, window_evictable = 0, window_locked = 0, nodes = 0;
  std::vector<int32_t> slots;
  std::vector<int64_t> children, child_locks;
};

void check_node(const PrefixTree& tree, int32_t node, Sums& sums) {
  const PrefixNode& n = tree.at(node);
  expect(n.size() > 0 && n.size() % tree.options.page_size == 0, "node ", node, " has ", n.size(), " tokens");
  expect(n.slots.size() == n.tokens.size(), "node ", node, " has ", n.tokens.size(), " tokens and ", n.slots.size(),
         " slots");
  expect(n.window_locks <= n.locks && n.window_locks >= 0, "node ", node, " has ", n.locks, " locks and ",
         n.window_locks, " window locks");
  expect(!n.tombstone || (tree.windowed() && n.num_children > 0), "node ", node, " is a tombstone and a leaf");
  expect(tree.find_child(n.parent, n.tokens) == node, "node ", node,
         " is not the only child that begins with its first page");
  (n.locks > 0 ? sums.locked : sums.evictable) += n.size();
  if (tree.windowed() && !n.tombstone) (n.window_locks > 0 ? sums.window_locked : sums.window_evictable) += n.size();
  const bool free_leaf = n.num_children == 0 && n.locks == 0;
  expect(n.leaf_since == (free_leaf ? n.used : 0), "node ", node, " is ", free_leaf ? "not " : "",
         "listed as a leaf that can go");
  const bool window_can_go =
      tree.windowed() && !n.tombstone && n.window_locks == 0 && (n.num_children > 0 || n.locks == 0);
  expect(n.window_since == (window_can_go ? n.used : 0), "node ", node, " is ", window_can_go ? "not " : "",
         "listed as one whose window copies can go");
  sums.slots.insert(sums.slots.end(), n.slots.begin(), n.slots.end());
  ++sums.children[static_cast<size_t>(n.parent)];
  sums.child_locks[static_cast<size_t>(n.parent)] += n.locks;
  ++sums.nodes;
}

}  // namespace

void PrefixTree::check() const {
  Sums sums;
  sums.children.resize(nodes.size());
  sums.child_locks.resize(nodes.size());
  int64_t live = 0;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (!nodes[i].live) continue;
    ++live;
    if (nodes[i].extra_key == nullptr) check_node(*this, static_cast<int32_t>(i), sums);
  }
  int64_t listed_leaves = 0;
  int64_t listed_windows = 0;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const PrefixNode& n = nodes[i];
    if (!n.live) continue;
    expect(n.num_children == sums.children[i], "node ", i, " counts ", n.num_children, " children and has ",
           sums.children[i]);
    if (n.extra_key != nullptr) {
      expect(find_root(*n.extra_key) == static_cast<int32_t>(i) && n.num_children > 0, "root ", i, " is lost or empty");
      continue;
    }
    expect(n.locks >= sums.child_locks[i], "node ", i, " has ", n.locks, " locks, its children ", sums.child_locks[i]);
    listed_leaves += n.leaf_since != 0 ? 1 : 0;
    listed_windows += n.window_since != 0 ? 1 : 0;
  }
  expect(live == sums.nodes + static_cast<int64_t>(roots.size()) && num_nodes == sums.nodes &&
             children.size() == static_cast<size_t>(sums.nodes),
         "it has ", sums.nodes, " nodes, counts ", num_nodes, " and finds ", children.size());
  expect(live + static_cast<int64_t>(free_nodes.size()) == static_cast<int64_t>(nodes.size()), "nodes are lost");
  expect(static_cast<int64_t>(leaves.size()) == listed_leaves &&
             static_cast<int64_t>(window_list.size()) == listed_windows,
         "the lists have nodes that are not there");
  expect(evictable == sums.evictable && locked == sums.locked, "it counts ", evictable, " evictable and ", locked,
         " locked slots, and has ", sums.evictable, " and ", sums.locked);
  expect(window_evictable == sums.window_evictable && window_locked == sums.window_locked, "it counts ",
         window_evictable, " evictable and ", window_locked, " locked window copies, and has ", sums.window_evictable,
         " and ", sums.window_locked);
  std::sort(sums.slots.begin(), sums.slots.end());
  const auto twice = std::adjacent_find(sums.slots.begin(), sums.slots.end());
  expect(twice == sums.slots.end(), "slot ", twice == sums.slots.end() ? 0 : *twice, " is there twice");
}

void PrefixTree::check_sometimes() {
#ifndef NDEBUG
  if (++calls_since_check * 64 < evictable + locked) return;
  calls_since_check = 0;
  check();
#endif
}

}  // namespace folio::inline v0::detail
