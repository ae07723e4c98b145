#include "replay/step_batch.hpp"

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

}  // namespace folio::replay
