#include "folio/backends/attention_metadata.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace folio::inline v0::backends {

PageTableView to_page_table(const BlockTableView& table, int32_t num_rows) {
  PageTableView view;
  view.kind = PageTableKind::kDense;
  view.indices = table.data;
  view.row_stride = table.row_stride;
  view.num_rows = num_rows;
  view.num_indices = num_rows > 0 ? int64_t{num_rows - 1} * table.row_stride + table.num_columns : 0;
  return view;
}

CommonAttentionMetadata CommonAttentionMetadata::unpadded(int32_t num_tokens, int32_t num_requests) const {
  core::require(num_requests >= 0 && num_requests <= num_reqs && num_tokens >= 0 && num_tokens <= num_actual_tokens,
                "unpadded to ", num_requests, " requests and ", num_tokens, " tokens; the batch has ", num_reqs,
                " and ", num_actual_tokens);
  const auto requests = static_cast<size_t>(num_requests);
  const auto tokens = static_cast<size_t>(num_tokens);
  const auto cut = [](auto span, size_t count) { return span.first(std::min(span.size(), count)); };
  CommonAttentionMetadata result = *this;
  result.num_reqs = num_requests;
  result.num_actual_tokens = num_tokens;
  result.query_start_loc = cut(query_start_loc, requests + 1);
  result.query_start_loc_host = cut(query_start_loc_host, requests + 1);
  result.seq_lens = cut(seq_lens, requests);
  result.seq_lens_host = cut(seq_lens_host, requests);
  result.dcp_local_seq_lens = cut(dcp_local_seq_lens, requests);
  result.encoder_seq_lens = cut(encoder_seq_lens, requests);
  result.is_prefilling = cut(is_prefilling, requests);
  result.slot_mapping = cut(slot_mapping, tokens);
  result.positions = cut(positions, tokens);
  result.block_table.num_rows = std::min(block_table.num_rows, num_requests);
  return result;
}

}  // namespace folio::inline v0::backends
