#include "kvcache/naive_prefixes_test_util.hpp"

#include <algorithm>
#include <stdexcept>

namespace folio::testing {
namespace {

void check(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

}  // namespace

std::vector<NaivePrefixes::Page*> NaivePrefixes::walk(const std::string& extra_key, std::span<const int32_t> tokens) {
  std::vector<Page*> path;
  Page* page = &roots_[extra_key];
  const auto step = static_cast<size_t>(page_size_);
  for (size_t i = 0; i + step <= tokens.size(); i += step) {
    const auto child = page->children.find({tokens.begin() + i, tokens.begin() + i + step});
    if (child == page->children.end()) break;
    page = child->second.get();
    path.push_back(page);
  }
  return path;
}

bool NaivePrefixes::usable(const std::vector<Page*>& path, size_t pages) const {
  int64_t end = static_cast<int64_t>(pages) * page_size_;
  const int64_t begin = std::max<int64_t>(end - window_, 0);
  for (size_t i = pages; i > 0 && end > begin; --i, end -= page_size_) {
    if (!path[i - 1]->copies) return false;
  }
  return true;
}

int64_t NaivePrefixes::find(const std::string& extra_key, std::span<const int32_t> tokens,
                            std::vector<int32_t>* slots) {
  const std::vector<Page*> path = walk(extra_key, tokens);
  size_t pages = path.size();
  while (!usable(path, pages)) --pages;
  if (slots != nullptr) {
    for (size_t i = 0; i < pages; ++i) slots->insert(slots->end(), path[i]->slots.begin(), path[i]->slots.end());
  }
  return static_cast<int64_t>(pages) * page_size_;
}

void NaivePrefixes::lock(const std::string& extra_key, std::span<const int32_t> tokens, int64_t length, int32_t by) {
  const std::vector<Page*> path = walk(extra_key, tokens.first(static_cast<size_t>(length)));
  check(static_cast<int64_t>(path.size()) * page_size_ == length, "a locked prefix is not there");
  for (Page* page : path) page->locks += by;
}

void NaivePrefixes::check_locked_window(const std::string& extra_key, std::span<const int32_t> tokens, int64_t length) {
  const std::vector<Page*> path = walk(extra_key, tokens.first(static_cast<size_t>(length)));
  check(static_cast<int64_t>(path.size()) * page_size_ == length, "a locked prefix was evicted");
  const int64_t begin = std::max<int64_t>(static_cast<int64_t>(tokens.size()) - window_, 0);
  for (int64_t at = begin; window_ > 0 && at < length; ++at) {
    check(path[static_cast<size_t>(at / page_size_)]->copies, "a locked prefix lost window copies that are read");
  }
}

int64_t NaivePrefixes::hand_over(const std::string& extra_key, std::span<const int32_t> tokens,
                                 std::span<int32_t> slots, int64_t from, int64_t window_begin, bool write_back,
                                 SlotChanges& changes) {
  const auto step = static_cast<size_t>(page_size_);
  const size_t end = tokens.size() / step * step;
  std::vector<Page*> path = walk(extra_key, tokens);
  Page* above = path.empty() ? &roots_[extra_key] : path.back();
  for (size_t at = static_cast<size_t>(from); at < path.size() * step; at += step) {
    Page& page = *path[at / step];
    const bool heals = !page.copies && static_cast<int64_t>(at) >= window_begin;
    for (size_t i = 0; i < step; ++i) {
      if (heals) changes.moved.push_back({slots[at + i], page.slots[i]});
      changes.freed.push_back(slots[at + i]);
      if (write_back) slots[at + i] = page.slots[i];
    }
    page.copies = page.copies || heals;
  }
  if (window_begin >= static_cast<int64_t>(end)) return static_cast<int64_t>(path.size() * step);
  for (size_t at = path.size() * step; at < end; at += step) {
    auto page = std::make_unique<Page>();
    page->slots.assign(slots.begin() + at, slots.begin() + at + step);
    page->tokens.assign(tokens.begin() + at, tokens.begin() + at + step);
    page->parent = above;
    page->copies = static_cast<int64_t>(at) >= window_begin;
    for (const int32_t slot : page->slots) check(by_slot_.emplace(slot, page.get()).second, "a slot has two owners");
    Page* next = page.get();
    above->children.emplace(next->tokens, std::move(page));
    above = next;
  }
  return static_cast<int64_t>(end);
}

void NaivePrefixes::evicted(const SlotChanges& changes) {
  check(changes.moved.empty(), "an eviction moves nothing");
  const auto step = static_cast<size_t>(page_size_);
  const auto page_at = [&](const std::vector<int32_t>& slots, size_t i) {
    const auto found = by_slot_.find(slots[i]);
    check(found != by_slot_.end(), "what was evicted was not there");
    check(std::equal(found->second->slots.begin(), found->second->slots.end(), slots.begin() + i), "half a page went");
    return found->second;
  };
  for (size_t i = 0; i < changes.window_freed.size(); i += step) {
    Page* page = page_at(changes.window_freed, i);
    check(page->copies, "window copies went twice");
    page->copies = false;
  }
  // From the last page on: the ends of paths come after their beginnings within a node, and before them between nodes.
  std::vector<Page*> gone;
  for (size_t i = 0; i < changes.freed.size(); i += step) gone.push_back(page_at(changes.freed, i));
  while (!gone.empty()) {
    const auto leaf = std::find_if(gone.begin(), gone.end(), [](const Page* page) { return page->children.empty(); });
    check(leaf != gone.end(), "a page went whose continuation stayed");
    Page* page = *leaf;
    gone.erase(leaf);
    check(page->locks == 0, "a locked page went");
    for (const int32_t slot : page->slots) by_slot_.erase(slot);
    page->parent->children.erase(std::vector<int32_t>(page->tokens));
  }
}

int64_t NaivePrefixes::locked() const {
  return std::count_if(by_slot_.begin(), by_slot_.end(), [](const auto& entry) { return entry.second->locks > 0; });
}

int64_t NaivePrefixes::copies() const {
  return std::count_if(by_slot_.begin(), by_slot_.end(), [](const auto& entry) { return entry.second->copies; });
}

}  // namespace folio::testing
