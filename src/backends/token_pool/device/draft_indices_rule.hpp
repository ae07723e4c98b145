#pragma once

#include <cstdint>

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "folio/backends/token_pool/draft_kv_indices.hpp"
#include "folio/types/export.hpp"

/// Where branches of drafts lie in the request table and in the output: bodies for one branch at one step.
namespace folio::inline v0::backends::token_pool {

/// The position of a branch's first draft token in its request's row, which has `end` tokens. With pages of one token a
/// branch's pages are its num_steps slots; of one branch they go on where the request ends.
FOLIO_HOST_DEVICE constexpr int64_t branch_begin(const DraftBranches& branches, int64_t end, int32_t branch) {
  const int64_t last = end % branches.page_size;
  const int64_t pages = (last + branches.num_steps + branches.page_size - 1) / branches.page_size;
  return end - last + branch * pages * branches.page_size + last;
}

/// Entries of the branches before branch `branch` of request `request`, whose predecessors have `sum_before` tokens.
FOLIO_HOST_DEVICE constexpr int64_t branch_offset(const DraftBranches& branches, int64_t sum_before, int64_t len,
                                                  int32_t request, int32_t branch, int32_t step) {
  return branches.topk * (sum_before + int64_t{request} * step) + branch * (len + step);
}

/// Writes a thread's share of one branch's entries: `len` slots from `start` on, then `step` of the branch's own.
FOLIO_HOST_DEVICE constexpr void write_branch(const SlotTable& table, const DraftBranches& branches, int32_t row,
                                              int64_t start, int64_t len, int32_t branch, int32_t step, int32_t* out,
                                              int32_t lane, int32_t lanes) {
  const int64_t own = branch_begin(branches, start + len, branch);
  for (int64_t j = lane; j < len; j += lanes) out[j] = table.at(row, start + j);
  for (int64_t j = lane; j < step; j += lanes) out[len + j] = table.at(row, own + j);
}

}  // namespace folio::inline v0::backends::token_pool
