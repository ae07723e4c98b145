#include "folio/backends/attention_metadata.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

/// The ranges of requests [begin, end). They keep their numbers.
std::span<const BidirectionalRange> ranges_of(std::span<const BidirectionalRange> ranges, int32_t begin, int32_t end) {
  const auto first = std::ranges::lower_bound(ranges, begin, {}, &BidirectionalRange::request);
  const auto last = std::ranges::lower_bound(ranges, end, {}, &BidirectionalRange::request);
  return {first, last};
}

}  // namespace

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
  result.seq_lens_host_upper_bound = cut(seq_lens_host_upper_bound, requests);
  result.causal_per_request = cut(causal_per_request, requests);
  result.mm_req_doc_ranges = ranges_of(mm_req_doc_ranges, 0, num_requests);
  result.dcp_local_seq_lens = cut(dcp_local_seq_lens, requests);
  result.encoder_seq_lens = cut(encoder_seq_lens, requests);
  result.encoder_seq_lens_host = cut(encoder_seq_lens_host, requests);
  result.is_prefilling = cut(is_prefilling, requests);
  result.slot_mapping = cut(slot_mapping, tokens);
  result.positions = cut(positions, tokens);
  result.block_table.num_rows = std::min(block_table.num_rows, num_requests);
  result.block_table_host.num_rows = std::min(block_table_host.num_rows, num_requests);
  return result;
}

void slice_query_start_locs(std::span<const int32_t> query_start_loc, int32_t begin, int32_t end,
                            std::span<int32_t> start_loc) {
  core::require(begin >= 0 && begin <= end && static_cast<size_t>(end) < query_start_loc.size(), "requests [", begin,
                ", ", end, ") of a query_start_loc of ", query_start_loc.size(), " entries");
  core::require(start_loc.size() == static_cast<size_t>(end - begin) + 1, "start_loc has ", start_loc.size(),
                " entries; ", end - begin + 1, " are needed");
  const int32_t first = query_start_loc[static_cast<size_t>(begin)];
  std::ranges::transform(query_start_loc.subspan(static_cast<size_t>(begin), start_loc.size()), start_loc.begin(),
                         [first](int32_t start) { return start - first; });
}

CommonAttentionMetadata CommonAttentionMetadata::slice(int32_t begin, int32_t end, std::span<int32_t> start_loc) const {
  if (where != Where::kHost)
    core::fail(ErrorCode::kUnsupported, "a batch on a device is not sliced; slice its host copy");
  if (!logits_indices_padded.empty()) {
    core::fail(ErrorCode::kUnsupported, "logits_indices_padded is not sliced; leave it empty");
  }
  if (!mm_req_doc_ranges.empty())
    core::fail(ErrorCode::kUnsupported, "mm_req_doc_ranges is not sliced; leave it empty");
  core::require(begin >= 0 && begin <= end && end <= num_reqs, "requests [", begin, ", ", end, ") of a batch of ",
                num_reqs);
  slice_query_start_locs(query_start_loc, begin, end, start_loc);

  const int32_t first_token = query_start_loc[static_cast<size_t>(begin)];
  const int32_t last_token = end == num_reqs ? num_actual_tokens : query_start_loc[static_cast<size_t>(end)];
  const auto part = [](auto span, int32_t from, int32_t to) {
    const auto size = static_cast<int32_t>(span.size());
    return span.subspan(static_cast<size_t>(std::min(from, size)),
                        static_cast<size_t>(std::min(to, size) - std::min(from, size)));
  };
  CommonAttentionMetadata result = *this;
  result.num_reqs = end - begin;
  result.num_actual_tokens = last_token - first_token;
  result.query_start_loc = start_loc;
  result.query_start_loc_host = query_start_loc_host.empty() ? query_start_loc_host : result.query_start_loc;
  result.seq_lens = part(seq_lens, begin, end);
  result.seq_lens_host = part(seq_lens_host, begin, end);
  result.seq_lens_host_upper_bound = part(seq_lens_host_upper_bound, begin, end);
  result.causal_per_request = part(causal_per_request, begin, end);
  result.dcp_local_seq_lens = part(dcp_local_seq_lens, begin, end);
  result.encoder_seq_lens = part(encoder_seq_lens, begin, end);
  result.encoder_seq_lens_host = part(encoder_seq_lens_host, begin, end);
  result.is_prefilling = part(is_prefilling, begin, end);
  result.slot_mapping = part(slot_mapping, first_token, last_token);
  result.positions = part(positions, first_token, last_token);
  // Of these requests, not of the batch: whether all of them are decodes is read off the longest query.
  result.max_query_len = 0;
  for (int32_t i = 0; i < result.num_reqs; ++i)
    result.max_query_len = std::max(result.max_query_len, result.query_len(i));
  result.max_seq_len = result.seq_lens.empty() ? 0 : std::ranges::max(result.seq_lens);
  result.block_table.data = block_table.data == nullptr ? nullptr : block_table.data + begin * block_table.row_stride;
  result.block_table.num_rows = std::clamp(block_table.num_rows - begin, 0, result.num_reqs);
  result.block_table_host = {};
  return result;
}

}  // namespace folio::inline v0::backends
