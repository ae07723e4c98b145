#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "folio/backends/attention_metadata.hpp"
#include "folio/context.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// Memory that a batch made from another one points into. The engine keeps one per step in flight and hands it in
/// again; it grows to the largest batch.
struct VirtualBatchStorage {
  std::vector<int32_t> query_start_loc;
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> block_table;
  std::shared_ptr<void> device;  ///< the same on a GPU, where batches are made for one
  size_t device_bytes = 0;
};

/// A batch for layers with chunked local attention, whose queries see the keys of their own chunk only, up to
/// themselves: every request becomes one per chunk of `chunk` positions that its queries lie in. The made requests are
/// ordinary causal ones: their tokens stand in the batch's order, their keys begin with the chunk, their rows of the
/// table hold its pages. Requests without queries (padding) make none. The slots stay those of the batch.
///
/// The result points into `storage` and the batch's arrays. O(tokens / chunk + R) x pages of a chunk. Host only. Throws
/// kInvalidArgument for chunks that are no multiple of the page size, requests with fewer keys than queries, and tables
/// too narrow for their keys, and for batches on a device.
FOLIO_API CommonAttentionMetadata make_local_attention_virtual_batches(int32_t chunk,
                                                                       const CommonAttentionMetadata& batch,
                                                                       int32_t page_size, VirtualBatchStorage& storage);

/// The same for the context's device. On a GPU the batch lies there, its lengths and its table are read from
/// query_start_loc_host, seq_lens_host and block_table_host, and the made arrays are enqueued on `stream`: the result
/// lies there too, with host copies in `storage`. A storage that must grow waits for the device.
FOLIO_API CommonAttentionMetadata make_local_attention_virtual_batches(const Context& context, int32_t chunk,
                                                                       const CommonAttentionMetadata& batch,
                                                                       int32_t page_size, VirtualBatchStorage& storage,
                                                                       Stream stream = {});

/// A batch of those tokens whose logits are wanted (`logits_indices_padded`, the first `num_logits_indices`,
/// ascending), for the layers behind the last that writes KV: they need not compute the others. Requests keep their
/// keys and have as many queries as tokens wanted of them; the caller gathers the queries' rows in that order. A batch
/// without logits indices, or of single queries, is returned as it is.
///
/// Queries that are not a request's last would be at wrong positions, so only those may be wanted: kInvalidArgument
/// names the request otherwise. The result points into `storage` and the batch's arrays, has no slots (the layers write
/// nothing) and no logits indices. O(R + indices). Host only.
FOLIO_API CommonAttentionMetadata
make_kv_sharing_fast_prefill_common_attn_metadata(const CommonAttentionMetadata& batch, VirtualBatchStorage& storage);

/// The same for the context's device. On a GPU the batch lies there, `logits_indices_host` holds what its
/// logits_indices_padded does, starts are read from query_start_loc_host, and those made are enqueued on `stream`.
FOLIO_API CommonAttentionMetadata make_kv_sharing_fast_prefill_common_attn_metadata(
    const Context& context, const CommonAttentionMetadata& batch, std::span<const int32_t> logits_indices_host,
    VirtualBatchStorage& storage, Stream stream = {});

}  // namespace folio::inline v0::backends
