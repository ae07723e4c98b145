#include "folio/kvcache/prefix_cache.hpp"

#include <algorithm>
#include <utility>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "kvcache/prefix_tree.hpp"

namespace folio::inline v0 {

using detail::PrefixNode;
using detail::PrefixPosition;
using detail::PrefixTree;

namespace {

constexpr int32_t kNone = PrefixTree::kNone;

/// A request's hand-over: whole pages of tokens from `start` on, which lies at the end of `node`.
struct HandOver {
  std::string_view extra_key;
  std::span<const int32_t> tokens;  ///< whole pages
  std::span<const int32_t> slots;   ///< at least as many
  int64_t window_begin = 0;
  int32_t node = kNone;
  int64_t start = 0;
  bool free_present = false;  ///< the caller's slots of tokens that the tree has are freed
};

struct HandedOver {
  int32_t node = kNone;  ///< the end of the path
  int64_t present = 0;   ///< tokens that were there
  int64_t length = 0;    ///< tokens that are there now
};

template <typename T>
auto part(std::span<T> all, int64_t begin, int64_t end) {
  return all.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

/// The request walks over node `node`, tokens [begin, end) of its own, which lost its window copies: those that the
/// request has, from window_begin on, become the tree's.
void heal(PrefixTree& tree, int32_t node, int64_t begin, int64_t end, const HandOver& request, SlotChanges& changes) {
  const int64_t from = std::max(begin, request.window_begin);
  if (from >= end) return;
  if (from > begin) {
    tree.touch(tree.split(node, from - begin));
    tree.touch(node);
  }
  const PrefixNode& healed = tree.at(node);
  for (int64_t i = from; i < end; ++i) {
    changes.moved.push_back({request.slots[static_cast<size_t>(i)], healed.slots[static_cast<size_t>(i - from)]});
  }
  tree.give_window_copies(node);
}

HandedOver walk(PrefixTree& tree, const HandOver& request, SlotChanges& changes) {
  const auto end = static_cast<int64_t>(request.tokens.size());
  tree.touch_path(request.node);
  int32_t node = request.node == kNone ? tree.find_root(request.extra_key) : request.node;
  int64_t length = request.start;
  while (length < end && node != kNone) {
    const auto rest = request.tokens.subspan(static_cast<size_t>(length));
    int32_t child = tree.find_child(node, rest);
    if (child == kNone) break;
    const int64_t equal = tree.common(tree.at(child), rest);
    if (equal < tree.at(child).size()) {
      const int32_t lower = std::exchange(child, tree.split(child, equal));
      tree.touch(child);
      tree.touch(lower);
    } else {
      tree.touch(child);
    }
    const PrefixNode& present = tree.at(child);
    if (request.free_present) {
      for (int64_t i = 0; i < equal; ++i) {
        const int32_t own = request.slots[static_cast<size_t>(length + i)];
        if (own != present.slots[static_cast<size_t>(i)]) changes.freed.push_back(own);
      }
    }
    if (present.tombstone) heal(tree, child, length, length + equal, request, changes);
    node = child;
    length += equal;
  }
  HandedOver result{node, length, length};
  // A leaf without window copies could never be matched.
  if (length == end || request.window_begin >= end) return result;
  const bool new_root = node == kNone;
  if (new_root) node = tree.add_root(request.extra_key);
  const int64_t tombstone_end = std::max(length, request.window_begin);
  SlotChanges undone;
  int32_t tombstone = kNone;
  try {
    if (tombstone_end > length) {
      undone.freed.reserve(static_cast<size_t>(tombstone_end - length));
      tombstone = tree.add_leaf(node, part(request.tokens, length, tombstone_end),
                                part(request.slots, length, tombstone_end), true);
    }
    result.node = tree.add_leaf(tombstone == kNone ? node : tombstone, part(request.tokens, tombstone_end, end),
                                part(request.slots, tombstone_end, end), false);
  } catch (...) {  // neither a tombstone nor a root stands without what is below it
    if (tombstone != kNone) {
      tree.remove_leaf(tombstone, undone);
    } else if (new_root) {
      tree.drop_root(node);
    }
    throw;
  }
  result.length = end;
  return result;
}

/// Where memory runs out the tree keeps what it has, split or healed, and nobody's slots have been freed.
HandedOver hand_over(PrefixTree& tree, const HandOver& request, SlotChanges& changes) {
  const size_t freed = changes.freed.size();
  detail::make_room(changes.freed, request.slots.size());
  if (tree.windowed()) detail::make_room(changes.moved, request.tokens.size());
  try {
    return walk(tree, request, changes);
  } catch (...) {
    changes.freed.resize(freed);
    throw;
  }
}

void check_hand_over(const PrefixTree& tree, const PrefixKey& key, std::span<const int32_t> slots,
                     int64_t window_begin) {
  core::require(slots.size() == key.tokens.size(), "there are ", slots.size(), " slots for ", key.tokens.size(),
                " tokens");
  const auto negative = std::find_if(slots.begin(), slots.end(), [](int32_t slot) { return slot < 0; });
  core::require(negative == slots.end(), "the slot of token ", negative - slots.begin(), " is ",
                negative == slots.end() ? 0 : *negative, "; slots are not negative");
  core::require(tree.windowed() || window_begin == 0, "window_begin is ", window_begin,
                " in a cache without a window; it must be left at 0");
  core::require(window_begin >= 0 && window_begin <= static_cast<int64_t>(slots.size()) &&
                    window_begin % tree.options.page_size == 0,
                "window_begin is ", window_begin, "; it must be a multiple of page_size (", tree.options.page_size,
                ") in [0, ", slots.size(), "]");
}

/// That the first `length` tokens and slots are those of the path that ends at `node`.
void check_path(const PrefixTree& tree, int32_t node, int64_t length, const PrefixKey& key,
                std::span<const int32_t> slots) {
  if (node == kNone) return;
  core::require(length <= static_cast<int64_t>(key.tokens.size()), "the lock keeps ", length, " tokens, the key has ",
                key.tokens.size());
  int64_t begin = length;
  for (; !tree.is_root(node); node = tree.at(node).parent) {
    const PrefixNode& n = tree.at(node);
    begin -= n.size();
    const auto at = static_cast<std::ptrdiff_t>(begin);
    core::require(std::equal(n.tokens.begin(), n.tokens.end(), key.tokens.begin() + at), "the key's first ", length,
                  " tokens are not those that the lock keeps");
    core::require(std::equal(n.slots.begin(), n.slots.end(), slots.begin() + at), "of the first ", length,
                  " slots, which the lock keeps, some are not the tree's; they are written back after every extend");
  }
  core::require(tree.at(node).extra_key != nullptr && *tree.at(node).extra_key == key.extra_key,
                "the key's extra key is not the one that the lock's path has");
}

/// The slots of tokens [begin, end) of the path that ends at `node`, `end` tokens from the beginning.
void copy_slots(const PrefixTree& tree, int32_t node, int64_t begin, int64_t end, std::span<int32_t> slots) {
  for (; end > begin; node = tree.at(node).parent) {
    const PrefixNode& n = tree.at(node);
    const int64_t first = std::max(begin, end - n.size());
    std::copy(n.slots.end() - (end - first), n.slots.end(), slots.begin() + (first - begin));
    end -= n.size();
  }
}

}  // namespace

PrefixLock::PrefixLock() noexcept = default;

PrefixLock::PrefixLock(PrefixLock&& other) noexcept
    : tree_(std::move(other.tree_)),
      node_(std::exchange(other.node_, kNone)),
      length_(std::exchange(other.length_, 0)),
      window_begin_(std::exchange(other.window_begin_, 0)) {}

PrefixLock& PrefixLock::operator=(PrefixLock&& other) noexcept {
  if (this == &other) return *this;
  reset();
  tree_ = std::move(other.tree_);
  node_ = std::exchange(other.node_, kNone);
  length_ = std::exchange(other.length_, 0);
  window_begin_ = std::exchange(other.window_begin_, 0);
  return *this;
}

PrefixLock::~PrefixLock() {
  reset();
}

void PrefixLock::reset() noexcept {
  if (node_ != kNone) tree_->unlock(node_, length_, window_begin_);
  tree_.reset();
  node_ = kNone;
  length_ = 0;
  window_begin_ = 0;
}

PrefixCache::PrefixCache(const PrefixCacheOptions& options) {
  core::require(options.page_size >= 1, "page_size is ", options.page_size, "; it must be 1 or more");
  core::require(options.window_left == -1 || options.window_left >= 1, "window_left is ", options.window_left,
                "; it must be -1 (no window) or 1 or more");
  tree_ = std::make_shared<PrefixTree>(options);
}

PrefixCache::~PrefixCache() = default;
PrefixCache::PrefixCache(PrefixCache&&) noexcept = default;
PrefixCache& PrefixCache::operator=(PrefixCache&&) noexcept = default;

const PrefixCacheOptions& PrefixCache::options() const noexcept {
  return tree_->options;
}
int64_t PrefixCache::size() const noexcept {
  return tree_->evictable + tree_->locked;
}
int64_t PrefixCache::evictable() const noexcept {
  return tree_->evictable;
}
int64_t PrefixCache::protected_slots() const noexcept {
  return tree_->locked;
}
int64_t PrefixCache::window_size() const noexcept {
  return tree_->window_evictable + tree_->window_locked;
}
int64_t PrefixCache::window_evictable() const noexcept {
  return tree_->window_evictable;
}
int64_t PrefixCache::window_protected() const noexcept {
  return tree_->window_locked;
}
int64_t PrefixCache::num_nodes() const noexcept {
  return tree_->num_nodes;
}

int64_t PrefixCache::match(const PrefixKey& key) const {
  return tree_->find(tree_->find_root(key.extra_key), tree_->whole_pages(key.tokens)).total();
}

PrefixLock PrefixCache::acquire(const PrefixKey& key, std::vector<int32_t>& slots) {
  PrefixTree& tree = *tree_;
  PrefixPosition found = tree.find(tree.find_root(key.extra_key), tree.whole_pages(key.tokens));
  PrefixLock lock;
  if (found.total() == 0) return lock;
  const int64_t length = found.total();
  const size_t old_size = slots.size();
  slots.reserve(old_size + static_cast<size_t>(length));
  if (found.inner != kNone) found.node = tree.split(found.inner, found.inner_length);
  tree.touch_path(found.node);
  if (found.inner != kNone) tree.touch(found.inner);
  slots.resize(old_size + static_cast<size_t>(length));
  copy_slots(tree, found.node, 0, length, std::span(slots).subspan(old_size));
  lock_end(lock, found.node, length);
  tree.check_sometimes();
  return lock;
}

void PrefixCache::lock_end(PrefixLock& lock, int32_t node, int64_t length) {
  PrefixLock next;
  next.window_begin_ = tree_->lock(node, length);
  next.tree_ = tree_;
  next.node_ = node;
  next.length_ = length;
  lock = std::move(next);
}

PrefixCache::Inserted PrefixCache::insert(const PrefixKey& key, std::span<const int32_t> slots, SlotChanges& changes,
                                          int64_t window_begin) {
  check_hand_over(*tree_, key, slots, window_begin);
  const HandedOver done =
      hand_over(*tree_, {key.extra_key, tree_->whole_pages(key.tokens), slots, window_begin}, changes);
  tree_->check_sometimes();
  return {done.present, done.length - done.present};
}

void PrefixCache::check_lock(const PrefixLock& lock, const PrefixKey& key, std::span<const int32_t> slots) const {
  core::require(lock.tree_ == nullptr || lock.tree_ == tree_, "the lock is of another prefix cache");
  check_path(*tree_, lock.node_, lock.length_, key, slots);
}

void PrefixCache::extend(PrefixLock& lock, const PrefixKey& key, std::span<int32_t> slots, SlotChanges& changes,
                         int64_t window_begin) {
  PrefixTree& tree = *tree_;
  check_hand_over(tree, key, slots, window_begin);
  check_lock(lock, key, slots);
  const std::span<const int32_t> tokens = tree.whole_pages(key.tokens);
  const auto end = static_cast<int64_t>(tokens.size());
  if (end == lock.length_ || window_begin >= end) return;
  const HandedOver done =
      hand_over(tree, {key.extra_key, tokens, slots, window_begin, lock.node_, lock.length_, true}, changes);
  copy_slots(tree, done.node, lock.length_, end, slots.subspan(static_cast<size_t>(lock.length_)));
  lock_end(lock, done.node, done.length);
  tree.check_sometimes();
}

void PrefixCache::finish(PrefixLock lock, const PrefixKey& key, std::span<const int32_t> slots, SlotChanges& changes,
                         int64_t window_begin) {
  PrefixTree& tree = *tree_;
  check_hand_over(tree, key, slots, window_begin);
  check_lock(lock, key, slots);
  const HandedOver done = hand_over(
      tree, {key.extra_key, tree.whole_pages(key.tokens), slots, window_begin, lock.node_, lock.length_, true},
      changes);
  const auto rest = slots.subspan(static_cast<size_t>(done.length));
  changes.freed.insert(changes.freed.end(), rest.begin(), rest.end());
  lock.reset();
  tree.check_sometimes();
}

PrefixCache::Amount PrefixCache::evict(const Amount& wanted, SlotChanges& changes) {
  PrefixTree& tree = *tree_;
  core::require(wanted.slots >= 0 && wanted.window_copies >= 0, "to evict: ", wanted.slots, " slots and ",
                wanted.window_copies, " window copies; amounts are not negative");
  core::require(tree.windowed() || wanted.window_copies == 0, "to evict: ", wanted.window_copies,
                " window copies of a cache without a window");
  Amount gone;
  const auto count = [&](const Amount& more) {
    gone.slots += more.slots;
    gone.window_copies += more.window_copies;
  };
  const auto remove = [&](int32_t leaf) { count(tree.remove_leaf(leaf, changes)); };
  const int64_t page_size = tree.options.page_size;
  while (gone.slots < wanted.slots && !tree.leaves.empty()) {
    const int32_t leaf = tree.leaves.begin()->second;
    const int64_t missing = wanted.slots - gone.slots;
    if (tree.options.whole_leaves || missing > tree.at(leaf).size() - page_size) {  // its last page would go too
      remove(leaf);
    } else {
      count(tree.cut_leaf(leaf, core::checked_round_up(missing, page_size), changes));
    }
  }
  while (gone.window_copies < wanted.window_copies && !tree.window_list.empty()) {
    const int32_t node = tree.window_list.begin()->second;
    if (tree.at(node).num_children == 0) {
      remove(node);
    } else {
      gone.window_copies += tree.at(node).size();
      tree.make_tombstone(node, changes);
    }
  }
  tree.check_sometimes();
  return gone;
}

void PrefixCache::clear() {
  core::require(tree_->num_locks == 0, tree_->num_locks, " locks live; they are given up first");
  *tree_ = PrefixTree(tree_->options);
}

void PrefixCache::check_invariants() const {
  tree_->check();
}

}  // namespace folio::inline v0
