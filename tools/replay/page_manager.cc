#include "replay/page_manager.hpp"

#include <fmt/format.h>

#include "folio/types/error.hpp"

namespace folio::replay {

PageManager::PageManager(int32_t num_pages, bool reuse) : reuse_(reuse) {
  if (num_pages < 1) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("the pool has {} pages; expected 1 or more", num_pages));
  }
  pages_.resize(static_cast<size_t>(num_pages));
  for (int32_t page = num_pages - 1; page >= 0; --page) push_free(page);
}

PageManager::Page& PageManager::at(int32_t page) {
  if (page < 0 || page >= num_pages()) {
    throw Error(ErrorCode::kInternal, fmt::format("page {} is outside the pool of {}", page, num_pages()));
  }
  return pages_[static_cast<size_t>(page)];
}

void PageManager::push_free(int32_t page) {
  pages_[static_cast<size_t>(page)] = Page{};
  pages_[static_cast<size_t>(page)].newer = first_free_;
  first_free_ = page;
  ++free_count_;
}

void PageManager::unlink(int32_t page) {
  Page& self = at(page);
  (self.older == kNone ? oldest_ : at(self.older).newer) = self.newer;
  (self.newer == kNone ? newest_ : at(self.newer).older) = self.older;
  self.older = self.newer = kNone;
  --cached_count_;
}

void PageManager::evict_oldest() {
  const int32_t page = oldest_;
  by_key_.erase(at(page).key);
  unlink(page);
  push_free(page);
  ++evictions_;
}

int32_t PageManager::acquire_prefix(std::span<const uint64_t> keys, std::vector<int32_t>& pages) {
  int32_t found = 0;
  for (const uint64_t key : keys) {
    const auto entry = by_key_.find(key);
    if (entry == by_key_.end()) break;
    Page& page = at(entry->second);
    if (page.references == 0) unlink(entry->second);
    ++page.references;
    pages.push_back(entry->second);
    ++found;
  }
  return found;
}

bool PageManager::allocate(int32_t count, std::vector<int32_t>& pages) {
  if (count < 0 || count > available()) return false;
  for (int32_t i = 0; i < count; ++i) {
    if (first_free_ == kNone) evict_oldest();
    const int32_t page = first_free_;
    first_free_ = at(page).newer;
    --free_count_;
    at(page).newer = kNone;
    at(page).references = 1;
    pages.push_back(page);
  }
  return true;
}

void PageManager::publish(int32_t page, uint64_t key) {
  Page& self = at(page);
  if (self.references == 0) throw Error(ErrorCode::kInternal, fmt::format("page {} is published but not held", page));
  if (self.published) throw Error(ErrorCode::kInternal, fmt::format("page {} is published twice", page));
  if (!reuse_ || !by_key_.emplace(key, page).second) return;
  self.published = true;
  self.key = key;
}

void PageManager::release(std::span<const int32_t> pages) {
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) {
    Page& self = at(*page);
    if (self.references == 0) throw Error(ErrorCode::kInternal, fmt::format("page {} is released but not held", *page));
    if (--self.references > 0) continue;
    if (!self.published) {
      push_free(*page);
      continue;
    }
    self.older = newest_;
    self.newer = kNone;
    (newest_ == kNone ? oldest_ : at(newest_).newer) = *page;
    newest_ = *page;
    ++cached_count_;
  }
}

void PageManager::drop_cache() {
  while (oldest_ != kNone) {
    const int32_t page = oldest_;
    by_key_.erase(at(page).key);
    unlink(page);
    push_free(page);
  }
}

}  // namespace folio::replay
