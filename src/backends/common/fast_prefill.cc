#include <algorithm>

#include "core/error.hpp"
#include "folio/backends/virtual_batches.hpp"

namespace folio::inline v0::backends {

CommonAttentionMetadata make_kv_sharing_fast_prefill_common_attn_metadata(const CommonAttentionMetadata& batch,
                                                                          VirtualBatchStorage& storage) {
  CommonAttentionMetadata result = batch;
  result.logits_indices_padded = {};
  result.num_logits_indices = 0;
  if (batch.logits_indices_padded.empty() || batch.max_query_len == 1) return result;
  core::require(batch.where == Where::kHost,
                "the batch's arrays are on a device; virtual batches are made on the host");
  const auto count = static_cast<size_t>(std::max(batch.num_logits_indices, 0));
  core::require(batch.num_logits_indices >= 0 && count <= batch.logits_indices_padded.size(), "num_logits_indices is ",
                batch.num_logits_indices, "; logits_indices_padded has ", batch.logits_indices_padded.size());
  core::require(batch.num_reqs >= 0 && batch.query_start_loc.size() > static_cast<size_t>(batch.num_reqs),
                "query_start_loc has ", batch.query_start_loc.size(), " entries; num_reqs is ", batch.num_reqs);
  const std::span<const int32_t> wanted = batch.logits_indices_padded.first(count);
  storage.query_start_loc.assign(1, 0);
  result.max_query_len = 0;
  size_t next = 0;
  for (int32_t i = 0; i < batch.num_reqs; ++i) {
    const int32_t end = batch.query_start_loc[static_cast<size_t>(i) + 1];
    const size_t first = next;
    while (next < count && wanted[next] < end) ++next;
    const auto num_wanted = static_cast<int32_t>(next - first);
    for (size_t k = first; k < next; ++k) {
      const int32_t last_ones = end - static_cast<int32_t>(next - k);
      core::require(wanted[k] == last_ones, "request ", i, ": the logits of token ", wanted[k],
                    " are wanted; only those of a request's last tokens can be, without gaps");
    }
    storage.query_start_loc.push_back(storage.query_start_loc.back() + num_wanted);
    result.max_query_len = std::max(result.max_query_len, num_wanted);
  }
  core::require(next == count, "logits index ", next < count ? wanted[next] : 0, " is beyond the batch's ",
                batch.query_start_loc[static_cast<size_t>(batch.num_reqs)], " tokens, or they do not ascend");
  result.query_start_loc = storage.query_start_loc;
  result.query_start_loc_host = {};
  result.num_actual_tokens = storage.query_start_loc.back();
  result.slot_mapping = {};
  result.positions = {};
  return result;
}

}  // namespace folio::inline v0::backends
