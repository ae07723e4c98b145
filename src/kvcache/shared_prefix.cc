#include "folio/shared_prefix.hpp"

#include <algorithm>
#include <cstring>

#include "core/error.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0 {
namespace {

using Pages = std::span<const int32_t>;

/// How many leading entries two rows have in common. Long runs are compared by memcmp, a cache line or two at a time.
int32_t common_pages(Pages a, Pages b) {
  constexpr size_t kStride = 32;
  const size_t most = std::min(a.size(), b.size());
  size_t same = 0;
  if (most == 0 || a[0] != b[0]) return 0;
  if (a.data() == b.data()) return static_cast<int32_t>(most);
  while (most - same >= kStride && std::memcmp(&a[same], &b[same], kStride * sizeof(int32_t)) == 0) same += kStride;
  while (same < most && a[same] == b[same]) ++same;
  return static_cast<int32_t>(same);
}

}  // namespace

std::span<const SharedPrefix> SharedPrefixFinder::find(const PageTableView& table,
                                                       std::span<const int32_t> full_pages) {
  prefixes_.clear();
  open_.clear();
  kvcache::check_table(table, static_cast<int64_t>(full_pages.size()));
  const auto num_rows = static_cast<int32_t>(full_pages.size());
  Pages row = num_rows > 0 ? kvcache::row_pages(table, 0, full_pages[0]) : Pages{};
  for (int32_t r = 0; r < num_rows; ++r) {
    Pages next;
    if (r + 1 < num_rows) next = kvcache::row_pages(table, r + 1, full_pages[static_cast<size_t>(r) + 1]);
    const int32_t common = common_pages(row, next);
    // What is longer than what these two rows share ends here.
    int32_t begin = r;
    while (!open_.empty() && open_.back().pages > common) {
      begin = open_.back().begin;
      prefixes_.push_back({.begin = begin, .end = r + 1, .pages = open_.back().pages});
      open_.pop_back();
    }
    if (common > 0 && (open_.empty() || open_.back().pages < common)) open_.push_back({common, begin});
    row = next;
  }
  // Backwards, every prefix comes after those around it.
  around_.clear();
  for (auto i = static_cast<int32_t>(prefixes_.size()) - 1; i >= 0; --i) {
    SharedPrefix& prefix = prefixes_[static_cast<size_t>(i)];
    while (!around_.empty() && prefixes_[static_cast<size_t>(around_.back())].begin >= prefix.end) around_.pop_back();
    prefix.parent = around_.empty() ? -1 : around_.back();
    around_.push_back(i);
  }
  return prefixes_;
}

void SharedPrefixFinder::order(const PageTableView& table, std::span<const int32_t> full_pages,
                               std::span<int32_t> rows) {
  kvcache::check_table(table, static_cast<int64_t>(full_pages.size()));
  places_.clear();
  for (const int32_t row : rows) {
    core::require(row >= 0 && static_cast<size_t>(row) < full_pages.size(), "row ", row,
                  " is to be ordered; there are ", full_pages.size());
    const auto position = static_cast<int32_t>(places_.size());
    const Pages pages = kvcache::row_pages(table, row, full_pages[static_cast<size_t>(row)]);
    places_.push_back({.pages = pages, .row = row, .position = position, .leader = position});
  }
  std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
    const auto common = static_cast<size_t>(common_pages(a.pages, b.pages));
    if (common < std::min(a.pages.size(), b.pages.size())) return a.pages[common] < b.pages[common];
    return a.pages.size() != b.pages.size() ? a.pages.size() < b.pages.size() : a.position < b.position;
  });
  const auto same_run = [](const Place& a, const Place& b) {
    return !a.pages.empty() && !b.pages.empty() && a.pages[0] == b.pages[0];
  };
  for (auto run = places_.begin(); run != places_.end();) {
    auto end = run + 1;
    while (end != places_.end() && same_run(*run, *end)) ++end;
    const int32_t leader =
        std::min_element(run, end, [](const Place& a, const Place& b) { return a.position < b.position; })->position;
    for (; run != end; ++run) {
      run->leader = leader;
      run->position = static_cast<int32_t>(run - places_.begin());
    }
  }
  std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
    return a.leader != b.leader ? a.leader < b.leader : a.position < b.position;
  });
  std::transform(places_.begin(), places_.end(), rows.begin(), [](const Place& place) { return place.row; });
}

}  // namespace folio::inline v0
