#include "folio/backends/virtual_batches.hpp"

#include <string>
#include <utility>

#include "backends.hpp"
#include "backends_batch.hpp"
#include "integers.hpp"

/// Batches that are made from another one, for layers that see only a part of it.
namespace folio::python {
namespace {

nb::object copy_of(std::span<const int32_t> values) {
  return nb::cast(to_numpy(std::vector<int32_t>(values.begin(), values.end())));
}

nb::object copy_of(const bk::BlockTableView& table) {
  std::vector<int32_t> pages;
  for (int32_t row = 0; row < table.num_rows; ++row) {
    const int32_t* const first = table.data + row * table.row_stride;
    pages.insert(pages.end(), first, first + table.num_columns);
  }
  return nb::cast(
      to_numpy(std::move(pages), {static_cast<size_t>(table.num_rows), static_cast<size_t>(table.num_columns)}));
}

/// A made batch as an object of its own.
CommonBatch own_batch(const bk::CommonAttentionMetadata& made, nb::object slot_mapping) {
  BatchArguments arguments;
  arguments.query_start_loc = copy_of(made.query_start_loc);
  arguments.seq_lens = copy_of(made.seq_lens.first(static_cast<size_t>(made.num_reqs)));
  if (made.block_table.data != nullptr) arguments.block_table = copy_of(made.block_table);
  arguments.slot_mapping = std::move(slot_mapping);
  arguments.num_reqs = made.num_reqs;
  arguments.num_actual_tokens = made.num_actual_tokens;
  arguments.max_query_len = made.max_query_len;
  arguments.max_seq_len = made.max_seq_len;
  arguments.causal = made.causal;
  return make_common_batch(arguments);
}

void require_host_batch(const CommonBatch& batch) {
  if (batch.view.where == Where::kHost) return;
  throw Error(ErrorCode::kUnsupported, "the batch lies on a GPU; virtual batches of the host's are offered");
}

}  // namespace

void bind_virtual_batches(nb::module_& m) {
  m.def(
      "make_local_attention_virtual_batches",
      [](int32_t attn_chunk_size, const CommonBatch& batch, int32_t block_size) {
        require_host_batch(batch);
        bk::VirtualBatchStorage storage;
        return own_batch(
            bk::make_local_attention_virtual_batches(attn_chunk_size, batch.with_spans(), block_size, storage),
            batch.slot_mapping_object);
      },
      nb::arg("attn_chunk_size"), nb::arg("common_attn_metadata"), nb::arg("block_size"),
      "A batch for layers with chunked local attention: every request becomes one per chunk of attn_chunk_size "
      "positions that its queries lie in, with the chunk's keys and pages. The slots stay those of the batch. Raises "
      "InvalidArgument for chunks that are no multiple of block_size, the tokens of a page; Error for batches on a "
      "GPU.");
  m.def(
      "make_kv_sharing_fast_prefill_common_attn_metadata",
      [](const CommonBatch& batch) {
        require_host_batch(batch);
        bk::VirtualBatchStorage storage;
        const bk::CommonAttentionMetadata made =
            bk::make_kv_sharing_fast_prefill_common_attn_metadata(batch.with_spans(), storage);
        return own_batch(made, made.slot_mapping.empty() ? nb::object(nb::none()) : batch.slot_mapping_object);
      },
      nb::arg("common_attn_metadata"),
      "A batch of the tokens whose logits are wanted (logits_indices_padded, the first num_logits_indices), for the "
      "layers behind the last that writes KV. The caller gathers the queries' rows in that order. Raises "
      "InvalidArgument where other tokens than a request's last are wanted; Error for batches on a GPU.");
}

}  // namespace folio::python
