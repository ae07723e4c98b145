#pragma once

#include <cstdint>
#include <span>

#include "folio/backends/attention_metadata.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/context.hpp"

namespace folio::inline v0::backends {

/// Which relations between a batch's lengths an attention type has.
struct BatchRules {
  bool keys_in_pages = true;          ///< seq_lens are covered by the block table's rows
  bool queries_are_keys = true;       ///< a request's query tokens are among its seq_lens
  bool slots_are_for_queries = true;  ///< the slots are the query tokens'
};

/// Whether kernels of the context read device memory.
inline bool on_gpu(const Context& context) {
  return context.device().type != DeviceType::kCpu;
}

/// What a builder plans from: the batch itself on a CPU; on a GPU the batch with the host's copies of its lengths in
/// place of the device's, its tables and slots as they are, no positions, and kHost. Throws kInvalidArgument, naming
/// the field, for arrays that lie elsewhere than the context's and for copies that are missing.
CommonAttentionMetadata host_batch(const Context& context, const CommonAttentionMetadata& batch);

/// Throws kInvalidArgument unless `host`, a copy of a block table on a GPU, has `num_reqs` rows and is laid out as it.
void check_table_copy(const BlockTableView& host, const BlockTableView& table, int32_t num_reqs);

/// The sizes of a batch's arrays and the bounds of the configuration; no entry of an array is read. Throws
/// kInvalidArgument naming the field.
void check_batch_sizes(const EngineConfig& config, const CommonAttentionMetadata& batch, const BatchRules& rules);

/// What every build checks of a host batch, in O(R): sizes, bounds of the configuration, every request's lengths
/// against the maxima and the block table, and what is_prefilling, positions and seq_lens_host_upper_bound say of
/// them. Throws kInvalidArgument naming the field and the request.
void check_batch_lengths(const AttentionSpec& spec, const EngineConfig& config, const CommonAttentionMetadata& batch,
                         const BatchRules& rules = {});

/// The first request with queries, given [R + 1] offsets; 0 where none has any. Its row of the block table begins with
/// what all share. A padding request's row may hold anything.
int32_t first_with_queries(std::span<const int32_t> cu_query_lens);

/// Tokens of a shared prefix that a cascade can use: whole pages that every request with queries had computed before
/// this step. Throws kInvalidArgument unless `common_prefix_len` is a multiple of the page size and not negative.
int32_t usable_prefix(int32_t common_prefix_len, int32_t page_size, const CommonAttentionMetadata& batch);

}  // namespace folio::inline v0::backends
