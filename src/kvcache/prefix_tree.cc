#include "kvcache/prefix_tree.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace folio::inline v0::detail {
namespace {

/// Runs of tokens are compared in pieces by memcmp; inside the piece that differs, one by one.
constexpr size_t kPiece = 128;

size_t common_tokens(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t size = std::min(a.size(), b.size());
  size_t i = 0;
  while (i + kPiece <= size && std::memcmp(a.data() + i, b.data() + i, kPiece * sizeof(int32_t)) == 0) i += kPiece;
  while (i < size && a[i] == b[i]) ++i;
  return i;
}

}  // namespace

int32_t PrefixTree::find_root(std::string_view extra_key) const {
  const auto found = roots.find(extra_key);
  return found == roots.end() ? kNone : found->second;
}

uint64_t PrefixTree::child_hash(int32_t parent, const int32_t* page) const {
  // The finisher of splitmix64 (public domain, Vigna 2015) over the parent and the page's tokens.
  uint64_t hash = static_cast<uint64_t>(parent);
  for (int32_t i = 0; i < options.page_size; ++i) {
    hash += 0x9e3779b97f4a7c15u + static_cast<uint32_t>(page[i]);
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
    hash ^= hash >> 31;
  }
  return hash;
}

int32_t PrefixTree::find_child(int32_t parent, std::span<const int32_t> tokens) const {
  const auto [first, last] = children.equal_range(child_hash(parent, tokens.data()));
  for (auto entry = first; entry != last; ++entry) {
    const PrefixNode& child = at(entry->second);
    const auto page = tokens.begin() + options.page_size;
    if (child.parent == parent && std::equal(tokens.begin(), page, child.tokens.begin())) return entry->second;
  }
  return kNone;
}

int64_t PrefixTree::common(const PrefixNode& node, std::span<const int32_t> tokens) const {
  const auto equal = static_cast<int64_t>(common_tokens(node.tokens, tokens));
  return equal - equal % options.page_size;
}

PrefixPosition PrefixTree::find(int32_t root, std::span<const int32_t> tokens) const {
  PrefixPosition at_end{.node = root};
  PrefixPosition usable = at_end;
  if (root == kNone) return usable;
  const auto length = static_cast<int64_t>(tokens.size());
  const int64_t window = std::max(options.window_left, 0);
  int64_t with_copies = std::numeric_limits<int64_t>::max() / 2;  // tokens since the last tombstone; there was none
  while (at_end.length < length) {
    const auto rest = tokens.subspan(static_cast<size_t>(at_end.length));
    const int32_t next = find_child(at_end.node, rest);
    if (next == kNone) break;
    const PrefixNode& child = at(next);
    const int64_t equal = common(child, rest);
    if (child.tombstone) {
      if (with_copies >= window) usable = at_end;
      with_copies = 0;
    } else {
      with_copies += equal;
    }
    if (equal < child.size()) {
      at_end.inner = next;
      at_end.inner_length = equal;
      break;
    }
    at_end.node = next;
    at_end.length += equal;
  }
  return with_copies >= window ? at_end : usable;
}

int32_t PrefixTree::new_node() {
  if (free_nodes.empty()) {
    if (free_nodes.capacity() <= nodes.size()) free_nodes.reserve(2 * nodes.size() + 1);  // drop_node allocates nothing
    nodes.emplace_back();
    free_nodes.push_back(static_cast<int32_t>(nodes.size()) - 1);
  }
  const int32_t node = free_nodes.back();
  const auto entry = [] {
    List made;
    made.emplace();
    return made.extract(made.begin());
  };
  at(node).leaf_entry = entry();
  if (windowed()) at(node).window_entry = entry();
  free_nodes.pop_back();
  at(node).live = true;
  return node;
}

void PrefixTree::drop_node(int32_t node) noexcept {
  at(node) = PrefixNode();
  free_nodes.push_back(node);
}

void PrefixTree::index(int32_t node) {
  children.emplace(child_hash(at(node).parent, at(node).tokens.data()), node);
}

void PrefixTree::unindex(int32_t node) {
  const auto [first, last] = children.equal_range(child_hash(at(node).parent, at(node).tokens.data()));
  children.erase(std::find_if(first, last, [&](const auto& entry) { return entry.second == node; }));
}

void PrefixTree::enlist(int32_t node) noexcept {
  PrefixNode& n = at(node);
  const auto place = [&](List& list, List::node_type& entry, uint64_t& since, bool wanted) {
    if (since == (wanted ? n.used : 0)) return;
    if (since != 0) entry = list.extract({since, node});
    since = wanted ? n.used : 0;
    if (!wanted) return;
    entry.value() = {since, node};
    list.insert(std::move(entry));
  };
  const bool inside = n.parent != kNone;
  const bool free_leaf = n.num_children == 0 && n.locks == 0;
  place(leaves, n.leaf_entry, n.leaf_since, inside && free_leaf);
  const bool has_copies = windowed() && !n.tombstone;
  place(window_list, n.window_entry, n.window_since,
        inside && has_copies && n.window_locks == 0 && (n.num_children > 0 || free_leaf));
}

void PrefixTree::count_window(const PrefixNode& node, int64_t sign) {
  if (!windowed() || node.tombstone) return;
  (node.window_locks > 0 ? window_locked : window_evictable) += sign * node.size();
}

void PrefixTree::touch(int32_t node) noexcept {
  at(node).used = ++clock;
  enlist(node);
}

void PrefixTree::touch_path(int32_t node) {
  path.clear();
  for (; node != kNone && !is_root(node); node = at(node).parent) path.push_back(node);
  // From the root on, so that of a path the beginning loses its window copies first.
  for (auto step = path.rbegin(); step != path.rend(); ++step) touch(*step);
}

int32_t PrefixTree::add_root(std::string_view extra_key) {
  const auto entry = roots.emplace(std::string(extra_key), kNone).first;
  int32_t root = kNone;
  try {
    root = new_node();
  } catch (...) {
    roots.erase(entry);
    throw;
  }
  entry->second = root;
  at(root).extra_key = &entry->first;
  return root;
}

void PrefixTree::drop_root(int32_t root) noexcept {
  roots.erase(roots.find(*at(root).extra_key));
  drop_node(root);
}

int32_t PrefixTree::add_leaf(int32_t parent, std::span<const int32_t> tokens, std::span<const int32_t> slots,
                             bool tombstone) {
  std::vector<int32_t> own_tokens(tokens.begin(), tokens.end()), own_slots(slots.begin(), slots.end());
  const int32_t leaf = new_node();
  PrefixNode& n = at(leaf);
  n.tokens = std::move(own_tokens);
  n.slots = std::move(own_slots);
  n.parent = parent;
  n.tombstone = tombstone;
  try {
    index(leaf);
  } catch (...) {
    drop_node(leaf);
    throw;
  }
  ++at(parent).num_children;
  ++num_nodes;
  evictable += n.size();
  count_window(n, 1);
  enlist(parent);
  touch(leaf);
  return leaf;
}

int32_t PrefixTree::split(int32_t node, int64_t length) {
  const auto& all = at(node);
  std::vector<int32_t> own_tokens(all.tokens.begin(), all.tokens.begin() + length);
  std::vector<int32_t> own_slots(all.slots.begin(), all.slots.begin() + length);
  const int32_t upper = new_node();
  PrefixNode& low = at(node);
  PrefixNode& up = at(upper);
  up.tokens = std::move(own_tokens);
  up.slots = std::move(own_slots);
  up.parent = low.parent;
  try {
    index(upper);
  } catch (...) {
    drop_node(upper);
    throw;
  }
  // `node` comes back under another hash: the same entry, and no more of them than now.
  const auto [first, last] = children.equal_range(child_hash(low.parent, low.tokens.data()));
  auto entry = children.extract(std::find_if(first, last, [&](const auto& child) { return child.second == node; }));
  low.tokens.erase(low.tokens.begin(), low.tokens.begin() + length);
  low.slots.erase(low.slots.begin(), low.slots.begin() + length);
  low.parent = upper;
  entry.key() = child_hash(upper, low.tokens.data());
  children.insert(std::move(entry));
  up.num_children = 1;
  up.locks = low.locks;
  up.window_locks = low.window_locks;
  up.tombstone = low.tombstone;
  up.used = low.used;
  ++num_nodes;
  enlist(upper);
  return upper;
}

PrefixCache::Amount PrefixTree::remove_leaf(int32_t node, SlotChanges& changes) {
  PrefixCache::Amount gone;
  auto slots = static_cast<size_t>(at(node).size());
  for (int32_t above = at(node).parent; at(above).tombstone && at(above).num_children == 1; above = at(above).parent) {
    slots += static_cast<size_t>(at(above).size());
  }
  make_room(changes.freed, slots);
  for (bool more = true; more;) {
    const PrefixNode& n = at(node);
    const int32_t parent = n.parent;
    changes.freed.insert(changes.freed.end(), n.slots.begin(), n.slots.end());
    gone.slots += n.size();
    if (windowed() && !n.tombstone) gone.window_copies += n.size();
    evictable -= n.size();
    count_window(n, -1);
    if (n.leaf_since != 0) leaves.erase({n.leaf_since, node});
    if (n.window_since != 0) window_list.erase({n.window_since, node});
    unindex(node);
    drop_node(node);
    --num_nodes;
    PrefixNode& above = at(parent);
    --above.num_children;
    more = above.num_children == 0 && above.tombstone;
    if (above.num_children == 0 && is_root(parent)) {
      drop_root(parent);
    } else {
      enlist(parent);
    }
    node = parent;
  }
  return gone;
}

PrefixCache::Amount PrefixTree::cut_leaf(int32_t node, int64_t slots, SlotChanges& changes) {
  PrefixNode& n = at(node);
  changes.freed.insert(changes.freed.end(), n.slots.end() - slots, n.slots.end());
  count_window(n, -1);
  const auto kept = static_cast<size_t>(n.size() - slots);
  n.tokens.resize(kept);
  n.slots.resize(kept);
  evictable -= slots;
  count_window(n, 1);
  return {slots, windowed() ? slots : 0};
}

void PrefixTree::make_tombstone(int32_t node, SlotChanges& changes) {
  PrefixNode& n = at(node);
  changes.window_freed.insert(changes.window_freed.end(), n.slots.begin(), n.slots.end());
  count_window(n, -1);
  n.tombstone = true;
  enlist(node);
}

void PrefixTree::give_window_copies(int32_t node) noexcept {
  PrefixNode& n = at(node);
  n.tombstone = false;
  count_window(n, 1);
  enlist(node);
}

int64_t PrefixTree::lock(int32_t node, int64_t length) noexcept {
  ++num_locks;
  int64_t window_begin = length;
  const int64_t window = std::max(options.window_left, 0);
  int64_t begin = length;
  for (int32_t step = node; !is_root(step); step = at(step).parent) {
    PrefixNode& n = at(step);
    if (n.locks++ == 0) {
      evictable -= n.size();
      locked += n.size();
    }
    begin -= n.size();
    if (length - window_begin < window) {
      count_window(n, -1);
      ++n.window_locks;
      count_window(n, 1);
      window_begin = begin;
    }
    enlist(step);
  }
  return window_begin;
}

void PrefixTree::unlock(int32_t node, int64_t length, int64_t window_begin) noexcept {
  --num_locks;
  int64_t begin = length;
  for (int32_t step = node; !is_root(step); step = at(step).parent) {
    PrefixNode& n = at(step);
    if (--n.locks == 0) {
      locked -= n.size();
      evictable += n.size();
    }
    begin -= n.size();
    if (begin >= window_begin) {
      count_window(n, -1);
      --n.window_locks;
      count_window(n, 1);
    }
    enlist(step);
  }
}

}  // namespace folio::inline v0::detail
