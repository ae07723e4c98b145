#include "replay/step_batch.hpp"

#include "folio/page_table.hpp"
#include "replay/mix.hpp"

namespace folio::replay {

void StepBatch::clear() {
  cu_q.assign(1, 0);
  indptr.assign(1, 0);
  kv_len.clear();
  indices.clear();
  slots.clear();
  rows.clear();
  draft_tokens = 0;
}

void StepBatch::add_request(std::span<const int32_t> pages, int32_t first, int32_t count, int32_t page_size) {
  const int32_t end = first + count;
  cu_q.push_back(cu_q.back() + count);
  kv_len.push_back(end);
  const int32_t used = (end + page_size - 1) / page_size;
  indices.insert(indices.end(), pages.begin(), pages.begin() + used);
  indptr.push_back(indptr.back() + used);
  for (int32_t position = first; position < end; ++position) {
    const int64_t page = pages[static_cast<size_t>(position / page_size)];
    slots.push_back(page * page_size + position % page_size);
  }
}

void StepBatch::build_drafts(std::span<const StepItem> items, const Scheduler& scheduler, int32_t page_size) {
  constexpr uint64_t kWrongToken = 0x77;
  clear();
  const DraftOptions& drafts = scheduler.options().drafts;
  draft_tokens = drafts.tokens;
  std::vector<int32_t> nodes;
  for (const StepItem& item : items) {
    const auto chain = scheduler.chain_of(item.request);
    add_request(scheduler.pages_of(item.request), item.first, drafts.tokens, page_size);
    true_path(drafts, item.request, item.first, item.count, nodes);
    const size_t root = rows.size();
    for (int32_t node = 0; node < drafts.tokens; ++node) {
      TokenRow row{item.request, item.first, chain[static_cast<size_t>(item.first)]};
      if (node > 0) {
        const TokenRow parent = rows[root + static_cast<size_t>(drafts.parent(node))];
        row.position = parent.position + 1;
        const auto depth = static_cast<size_t>(row.position - item.first);
        row.rejected = depth >= nodes.size() || nodes[depth] != node;
        row.link = row.rejected ? mix(parent.link, kWrongToken, static_cast<uint64_t>(node))
                                : chain[static_cast<size_t>(row.position)];
      }
      rows.push_back(row);
    }
  }
}

void StepBatch::build(std::span<const StepItem> items, const Scheduler& scheduler, int32_t page_size) {
  clear();
  for (const StepItem& item : items) {
    const auto chain = scheduler.chain_of(item.request);
    add_request(scheduler.pages_of(item.request), item.first, item.count, page_size);
    for (int32_t position = item.first; position < item.first + item.count; ++position)
      rows.push_back({item.request, position, chain[static_cast<size_t>(position)]});
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
