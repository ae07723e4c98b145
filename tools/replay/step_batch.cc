#include "replay/step_batch.hpp"

#include "folio/page_table.hpp"

namespace folio::replay {

void StepBatch::build(std::span<const StepItem> items, const Scheduler& scheduler, int32_t page_size) {
  cu_q.assign(1, 0);
  indptr.assign(1, 0);
  kv_len.clear();
  indices.clear();
  slots.clear();
  rows.clear();
  for (const StepItem& item : items) {
    const int32_t end = item.first + item.count;
    const auto pages = scheduler.pages_of(item.request);
    const auto chain = scheduler.chain_of(item.request);
    cu_q.push_back(cu_q.back() + item.count);
    kv_len.push_back(end);
    const int32_t used = (end + page_size - 1) / page_size;
    indices.insert(indices.end(), pages.begin(), pages.begin() + used);
    indptr.push_back(indptr.back() + used);
    for (int32_t position = item.first; position < end; ++position) {
      const int64_t page = pages[static_cast<size_t>(position / page_size)];
      slots.push_back(page * page_size + position % page_size);
      rows.push_back({item.request, position, chain[static_cast<size_t>(position)]});
    }
  }
}

int32_t StepBatch::common_prefix_pages(SharedPrefixFinder& finder, std::vector<int32_t>& full_pages,
                                       int32_t page_size) const {
  full_pages.clear();
  for (size_t r = 0; r < kv_len.size(); ++r) full_pages.push_back((kv_len[r] - (cu_q[r + 1] - cu_q[r])) / page_size);
  const auto prefixes = finder.find(csr_table(indices, indptr), full_pages);
  const bool all = !prefixes.empty() && prefixes.back().begin == 0 && prefixes.back().end == num_requests();
  return all ? prefixes.back().pages : 0;
}

void PrefixOrder::apply(std::vector<StepItem>& items, const Scheduler& scheduler, int32_t page_size) {
  indptr_.assign(1, 0);
  indices_.clear();
  full_pages_.clear();
  order_.clear();
  for (const StepItem& item : items) {
    const auto pages = scheduler.pages_of(item.request);
    const int32_t full = item.first / page_size;
    indices_.insert(indices_.end(), pages.begin(), pages.begin() + full);
    indptr_.push_back(static_cast<int32_t>(indices_.size()));
    full_pages_.push_back(full);
    order_.push_back(static_cast<int32_t>(order_.size()));
  }
  finder_.order(csr_table(indices_, indptr_), full_pages_, order_);
  ordered_.clear();
  for (const int32_t i : order_) ordered_.push_back(items[static_cast<size_t>(i)]);
  items.swap(ordered_);
}

}  // namespace folio::replay
