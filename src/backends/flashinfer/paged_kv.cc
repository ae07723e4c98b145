#include <algorithm>

#include "backends/common/batch_checks.hpp"
#include "backends/common/gpu_memory.hpp"
#include "backends/flashinfer/builder_state.hpp"
#include "core/error.hpp"
#include "folio/page_table.hpp"
#include "folio/table_ops.hpp"

namespace folio::inline v0::backends {

void copy_page_indices(const PageTableView& table, std::span<const int32_t> indptr, std::span<int32_t> indices) {
  core::require(!indptr.empty() && indptr[0] == 0, "indptr must begin with 0");
  core::require(indptr.size() <= static_cast<size_t>(table.num_rows) + 1, "indptr has ", indptr.size(),
                " entries; the table has ", table.num_rows, " rows");
  core::require(indices.size() >= static_cast<size_t>(indptr.back()), "indices has ", indices.size(), " entries; ",
                indptr.back(), " are needed");
  const bool dense = table.kind == PageTableKind::kDense;
  const auto begin_of = [&](size_t row) {
    return dense ? static_cast<int64_t>(row) * table.row_stride + table.first_column : int64_t{table.indptr[row]};
  };
  for (size_t row = 0; row + 1 < indptr.size(); ++row) {
    const int32_t count = indptr[row + 1] - indptr[row];
    const int64_t begin = begin_of(row);
    const int64_t row_end = dense ? static_cast<int64_t>(row + 1) * table.row_stride : int64_t{table.indptr[row + 1]};
    const int64_t end = std::min(row_end, table.num_indices);
    core::require(count >= 0 && begin + count <= end, "row ", row, " needs ", count, " pages from entry ", begin,
                  " on; its entries end at ", end);
  }
  for (size_t row = 0; row + 1 < indptr.size(); ++row) {
    std::copy_n(table.indices + begin_of(row), indptr[row + 1] - indptr[row], indices.data() + indptr[row]);
  }
}

namespace {

/// The pages of a table in a GPU's memory, gathered there: enqueued. Lengths and indptr are the host's.
std::span<const int32_t> gather_on_gpu(FlashInferMetadataBuilder::State& state, const PageTableView& table,
                                       int32_t page_size, Stream stream) {
  const std::span<const int32_t> seq_lens = state.paged_kv_seq_lens;
  const auto num_pages = static_cast<size_t>(state.paged_kv_indptr.back());
  const size_t rows = seq_lens.size();
  const int32_t* const lens = state.gpu_paged_kv_seq_lens.put(seq_lens, stream);
  // Folio's own function makes indptr and last_page_len beside the indices; callers have the host's.
  const auto made = state.gpu_paged_kv_arrays.room<int32_t>(2 * rows + 1 + num_pages);
  to_csr(state.context, table, {lens, rows}, page_size, made.first(rows + 1), made.last(num_pages),
         made.subspan(rows + 1, rows), stream);
  return made.last(num_pages);
}

}  // namespace

PagedKvArrays FlashInferMetadataBuilder::paged_kv_arrays(const FlashInferMetadata& metadata, Stream stream) {
  State& state = *state_;
  const auto num_reqs = static_cast<size_t>(metadata.num_reqs);
  const int32_t prefix = metadata.common_prefix_len;
  const int32_t prefix_pages = prefix / metadata.page_size;
  const ParallelConfig& parallel = state.config.parallel;
  state.paged_kv_seq_lens.resize(num_reqs);
  std::ranges::transform(metadata.seq_lens_host, state.paged_kv_seq_lens.begin(), [&](int32_t seq_len) {
    const int32_t own = std::max(0, seq_len - prefix);
    if (!uses_dcp(state.config)) return own;
    // A row's pages hold this rank's share of the tokens.
    return shard_len(own, parallel.decode_context_parallel_size, parallel.decode_context_parallel_rank,
                     parallel.cp_kv_cache_interleave_size);
  });
  state.paged_kv_indptr.resize(num_reqs + 1);
  state.paged_kv_last_page_len.resize(num_reqs);
  paged_indptr(state.paged_kv_seq_lens, metadata.page_size, state.paged_kv_indptr, state.paged_kv_last_page_len);
  PageTableView table = to_page_table(metadata.block_table, metadata.num_reqs);
  table.first_column = prefix_pages;
  std::span<const int32_t> indices;
  if (on_gpu(state.context)) {
    indices = gather_on_gpu(state, table, metadata.page_size, stream);
  } else {
    state.paged_kv_indices.resize(static_cast<size_t>(state.paged_kv_indptr.back()));
    copy_page_indices(table, state.paged_kv_indptr, state.paged_kv_indices);
    indices = state.paged_kv_indices;
  }

  const auto padded = std::max(num_reqs, static_cast<size_t>(metadata.num_padded_reqs));
  state.paged_kv_indptr.resize(padded + 1, state.paged_kv_indptr.back());
  state.paged_kv_last_page_len.resize(padded, 1);
  state.paged_kv_seq_lens.resize(padded, 0);
  PagedKvArrays arrays{.indptr = state.paged_kv_indptr,
                       .indices = indices,
                       .last_page_len = state.paged_kv_last_page_len,
                       .seq_lens = state.paged_kv_seq_lens,
                       .shared_kv_page_indices = {}};
  if (prefix > 0) {
    arrays.shared_qo_indptr = {0, metadata.num_actual_tokens};
    arrays.shared_kv_page_indptr = {0, prefix_pages};
    arrays.shared_kv_page_indices = {
        metadata.block_table.data + metadata.prefix_request * metadata.block_table.row_stride,
        static_cast<size_t>(prefix_pages)};
    arrays.shared_kv_last_page_len = metadata.page_size;
  }
  return arrays;
}

}  // namespace folio::inline v0::backends
