#pragma once

#include <cstdint>
#include <vector>

#include "folio/shared_prefix.hpp"
#include "replay/scheduler.hpp"

namespace folio::replay {

/// A token of a step.
struct TokenRow {
  int32_t request = 0;
  int32_t position = 0;
  uint64_t link = 0;      ///< the request's token chain here
  bool rejected = false;  ///< a draft that is not the request's token: its outputs are nobody's
};

/// A step as attention wants it: lengths, page tables, slots.
struct StepBatch {
  std::vector<int32_t> cu_q;     ///< [requests + 1]
  std::vector<int32_t> kv_len;   ///< [requests]
  std::vector<int32_t> indptr;   ///< [requests + 1], pages
  std::vector<int32_t> indices;  ///< [indptr.back()]
  std::vector<int64_t> slots;    ///< [tokens]
  std::vector<TokenRow> rows;    ///< [tokens]

  int32_t draft_tokens = 0;  ///< of each request, where they are verified; kv_len counts them all

  int32_t num_requests() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t num_tokens() const { return static_cast<int32_t>(rows.size()); }

  /// Rebuilds everything for the scheduler's items; memory is kept from step to step.
  void build(std::span<const StepItem> items, const Scheduler& scheduler, int32_t page_size);

  /// The same for items with drafts: a row for every node of their trees.
  void build_drafts(std::span<const StepItem> items, const Scheduler& scheduler, int32_t page_size);

  /// Leading full pages, computed before the step, that all requests have in common: what an engine's page manager
  /// would tell its backend. `full_pages` is scratch.
  int32_t common_prefix_pages(SharedPrefixFinder& finder, std::vector<int32_t>& full_pages, int32_t page_size) const;

 private:
  void clear();
  void add_request(std::span<const int32_t> pages, int32_t first, int32_t count, int32_t page_size);
};

/// Brings items whose requests begin with the same pages together; others keep their places.
class PrefixOrder {
 public:
  void apply(std::vector<StepItem>& items, const Scheduler& scheduler, int32_t page_size);

 private:
  SharedPrefixFinder finder_;
  std::vector<int32_t> indptr_, indices_, full_pages_, order_;
  std::vector<StepItem> ordered_;
};

}  // namespace folio::replay
