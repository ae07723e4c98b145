#include "backends/common/batch_checks.hpp"

#include <algorithm>
#include <functional>

#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

/// `value` within an optional bound of the configuration.
void require_bound(const char* name, int32_t value, const char* bound_name, int32_t bound) {
  core::require(value >= 0, name, " is ", value, "; it must not be negative");
  core::require(bound == 0 || value <= bound, name, " is ", value, "; ", bound_name, " is ", bound);
}

/// The fields that repeat what lengths say already, where they are given.
void check_repeated_fields(const EngineConfig& config, const CommonAttentionMetadata& batch, const BatchRules& rules) {
  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  const std::span<const uint8_t> prefilling = batch.is_prefilling;
  core::require(prefilling.empty() || prefilling.size() >= num_reqs, "is_prefilling has ", prefilling.size(),
                " entries; num_reqs is ", batch.num_reqs);
  const std::span<const int32_t> bounds = batch.seq_lens_host_upper_bound;
  core::require(bounds.empty() || bounds.size() >= num_reqs, "seq_lens_host_upper_bound has ", bounds.size(),
                " entries; num_reqs is ", batch.num_reqs);
  const auto num_queries = static_cast<size_t>(batch.query_start_loc[num_reqs]);
  const std::span<const int64_t> positions = rules.queries_are_keys ? batch.positions : std::span<const int64_t>();
  core::require(positions.empty() || positions.size() >= num_queries, "positions has ", positions.size(),
                " entries; the requests have ", num_queries, " query tokens");
  const int32_t max_model_len = config.model.max_model_len;
  for (int32_t i = 0; i < batch.num_reqs; ++i) {
    const auto at = static_cast<size_t>(i);
    const int32_t seq_len = batch.seq_lens[at];
    const bool in_prompt = !prefilling.empty() && prefilling[at] != 0;
    core::require(prefilling.empty() || prefilling[at] <= 1, "request ", i, " has an is_prefilling of ",
                  prefilling.empty() ? 0 : int32_t{prefilling[at]}, "; it is 0 or 1");
    if (!bounds.empty()) {
      core::require(bounds[at] >= seq_len && (!in_prompt || bounds[at] == seq_len), "request ", i,
                    " has a seq_lens_host_upper_bound of ", bounds[at], "; its seq_len is ", seq_len,
                    in_prompt ? ", which it must be while the prompt is computed" : ", which it must not be below");
      core::require(max_model_len == 0 || bounds[at] <= max_model_len, "request ", i,
                    " has a seq_lens_host_upper_bound of ", bounds[at], "; max_model_len is ", max_model_len);
    }
    if (positions.empty() || batch.query_len(i) == 0) continue;
    const int64_t first = positions[static_cast<size_t>(batch.query_start_loc[at])];
    const int64_t last = positions[static_cast<size_t>(batch.query_start_loc[at + 1]) - 1];
    core::require(first == batch.num_computed_tokens(i) && last == seq_len - 1, "request ", i, " has positions ", first,
                  " to ", last, "; its lengths say ", batch.num_computed_tokens(i), " to ", seq_len - 1);
  }
}

}  // namespace

void check_batch_sizes(const EngineConfig& config, const CommonAttentionMetadata& batch, const BatchRules& rules) {
  require_bound("num_reqs", batch.num_reqs, "max_num_seqs", config.scheduler.max_num_seqs);
  require_bound("num_actual_tokens", batch.num_actual_tokens, "max_num_batched_tokens",
                config.scheduler.max_num_batched_tokens);
  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  core::require(batch.query_start_loc.size() > num_reqs, "query_start_loc has ", batch.query_start_loc.size(),
                " entries; num_reqs is ", batch.num_reqs, ", which needs one more than that");
  core::require(batch.seq_lens.size() >= num_reqs, "seq_lens has ", batch.seq_lens.size(), " entries; num_reqs is ",
                batch.num_reqs);
  if (rules.slots_are_for_queries) {
    core::require(batch.slot_mapping.size() <= static_cast<size_t>(batch.num_actual_tokens), "slot_mapping has ",
                  batch.slot_mapping.size(), " entries; num_actual_tokens is ", batch.num_actual_tokens);
  }
  if (!rules.keys_in_pages) return;
  core::require(batch.block_table.num_rows >= batch.num_reqs, "the block table has ", batch.block_table.num_rows,
                " rows; num_reqs is ", batch.num_reqs);
  core::require(batch.block_table.row_stride >= batch.block_table.num_columns, "the block table has ",
                batch.block_table.num_columns, " columns and a row stride of ", batch.block_table.row_stride);
}

CommonAttentionMetadata host_batch(const Context& context, const CommonAttentionMetadata& batch) {
  if (!on_gpu(context)) {
    core::require(batch.where == Where::kHost, "the batch's arrays are on a device; the context is a CPU's");
    return batch;
  }
  core::require(batch.where == Where::kDevice,
                "the batch's arrays are on the host; the context is a GPU's: give arrays ",
                "there, with query_start_loc_host and seq_lens_host for planning");
  const auto num_reqs = static_cast<size_t>(std::max(batch.num_reqs, 0));
  const auto require_copy = [](const char* name, size_t entries, size_t needed) {
    core::require(entries >= needed, name, " has ", entries, " entries; on a GPU, ", needed,
                  " are needed for planning");
  };
  require_copy("query_start_loc_host", batch.query_start_loc_host.size(), num_reqs + 1);
  require_copy("seq_lens_host", batch.seq_lens_host.size(), num_reqs);
  require_copy("encoder_seq_lens_host", batch.encoder_seq_lens_host.size(),
               batch.encoder_seq_lens.empty() ? 0 : num_reqs);
  core::require(batch.query_start_loc.size() > num_reqs && batch.seq_lens.size() >= num_reqs, "query_start_loc has ",
                batch.query_start_loc.size(), " entries and seq_lens ", batch.seq_lens.size(), "; num_reqs is ",
                batch.num_reqs);
  CommonAttentionMetadata host = batch;
  host.where = Where::kHost;
  host.query_start_loc = batch.query_start_loc_host;
  host.seq_lens = batch.seq_lens_host;
  host.positions = {};
  host.encoder_seq_lens = batch.encoder_seq_lens.empty() ? batch.encoder_seq_lens : batch.encoder_seq_lens_host;
  return host;
}

void check_batch_lengths(const AttentionSpec& spec, const EngineConfig& config, const CommonAttentionMetadata& batch,
                         const BatchRules& rules) {
  check_batch_sizes(config, batch, rules);
  core::require(batch.query_start_loc[0] == 0, "query_start_loc begins with ", batch.query_start_loc[0],
                "; it must begin with 0");
  // Under decode context parallelism every page stands for one on each rank.
  const int64_t table_tokens =
      int64_t{batch.block_table.num_columns} * spec.page_size * config.parallel.decode_context_parallel_size;
  const int32_t max_model_len = config.model.max_model_len;
  for (int32_t i = 0; i < batch.num_reqs; ++i) {
    const auto at = static_cast<size_t>(i);
    const int32_t query_len = batch.query_start_loc[at + 1] - batch.query_start_loc[at];
    const int32_t seq_len = batch.seq_lens[at];
    core::require(query_len >= 0 && query_len <= batch.max_query_len, "request ", i, " has ", query_len,
                  " query tokens; max_query_len is ", batch.max_query_len);
    core::require(seq_len >= (rules.queries_are_keys ? query_len : 0) && seq_len <= batch.max_seq_len, "request ", i,
                  " has a seq_len of ", seq_len, " and ", query_len, " query tokens; max_seq_len is ",
                  batch.max_seq_len);
    core::require(max_model_len == 0 || seq_len <= max_model_len, "request ", i, " has a seq_len of ", seq_len,
                  "; max_model_len is ", max_model_len);
    core::require(!rules.keys_in_pages || seq_len <= table_tokens, "request ", i, " has a seq_len of ", seq_len,
                  "; a row of the block table has ", batch.block_table.num_columns, " pages of ", spec.page_size,
                  " tokens");
  }
  const int32_t num_tokens = batch.query_start_loc[static_cast<size_t>(batch.num_reqs)];
  core::require(num_tokens <= batch.num_actual_tokens, "the requests have ", num_tokens,
                " query tokens; num_actual_tokens is ", batch.num_actual_tokens);
  check_repeated_fields(config, batch, rules);
}

void check_table_copy(const BlockTableView& host, const BlockTableView& table, int32_t num_reqs) {
  core::require(host.data != nullptr && host.num_rows >= num_reqs && host.num_columns == table.num_columns &&
                    host.row_stride == table.row_stride,
                "block_table_host has ", host.num_rows, " rows of ", host.num_columns, " columns, ", host.row_stride,
                " apart, the block table ", table.num_rows, " of ", table.num_columns, ", ", table.row_stride,
                " apart; on a GPU shared prefixes are found in a copy on the host, laid out alike");
}

int32_t first_with_queries(std::span<const int32_t> cu_query_lens) {
  const auto rises = std::ranges::adjacent_find(cu_query_lens, std::ranges::less());
  return rises == cu_query_lens.end() ? 0 : static_cast<int32_t>(rises - cu_query_lens.begin());
}

int32_t usable_prefix(int32_t common_prefix_len, int32_t page_size, const CommonAttentionMetadata& batch) {
  core::require(common_prefix_len >= 0 && common_prefix_len % page_size == 0, "common_prefix_len is ",
                common_prefix_len, "; it must be a multiple of the page size, ", page_size);
  int32_t usable = common_prefix_len;
  bool has_queries = false;
  for (int32_t i = 0; i < batch.num_reqs && usable > 0; ++i) {
    const int32_t query_len =
        batch.query_start_loc[static_cast<size_t>(i) + 1] - batch.query_start_loc[static_cast<size_t>(i)];
    if (query_len == 0) continue;  // padding
    has_queries = true;
    usable = std::min(usable, batch.seq_lens[static_cast<size_t>(i)] - query_len);
  }
  return has_queries ? usable / page_size * page_size : 0;
}

}  // namespace folio::inline v0::backends
