#pragma once

#include <cstdint>
#include <vector>

#include "replay/scheduler.hpp"

namespace folio::replay {

/// A token of a step.
struct TokenRow {
  int32_t request = 0;
  int32_t position = 0;
  uint64_t link = 0;  ///< the request's token chain here
};

/// A step as attention wants it: lengths, page tables, slots.
struct StepBatch {
  std::vector<int32_t> cu_q;     ///< [requests + 1]
  std::vector<int32_t> kv_len;   ///< [requests]
  std::vector<int32_t> indptr;   ///< [requests + 1], pages
  std::vector<int32_t> indices;  ///< [indptr.back()]
  std::vector<int64_t> slots;    ///< [tokens]
  std::vector<TokenRow> rows;    ///< [tokens]

  int32_t num_requests() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t num_tokens() const { return static_cast<int32_t>(rows.size()); }

  /// Rebuilds everything for the scheduler's items; memory is kept from step to step.
  void build(std::span<const StepItem> items, const Scheduler& scheduler, int32_t page_size);
};

}  // namespace folio::replay
