#include "core/error.hpp"
#include "folio/backends/batch_order.hpp"

namespace folio::inline v0::backends {
namespace {

/// Query lengths, on the host.
class QueryLens {
 public:
  explicit QueryLens(const CommonAttentionMetadata& batch)
      : starts_(batch.where == Where::kHost ? batch.query_start_loc : batch.query_start_loc_host) {
    core::require(starts_.size() > static_cast<size_t>(batch.num_reqs), "query_start_loc on the host has ",
                  starts_.size(), " entries; num_reqs is ", batch.num_reqs, ", which needs one more than that");
  }
  int32_t start(int32_t i) const { return starts_[static_cast<size_t>(i)]; }
  int32_t operator[](int32_t i) const { return start(i + 1) - start(i); }

 private:
  std::span<const int32_t> starts_;
};

BatchSplit all_decodes(const CommonAttentionMetadata& batch) {
  return {batch.num_reqs, 0, batch.num_actual_tokens, 0};
}

/// True if every request has `len` query tokens or none.
bool is_uniform(const QueryLens& query_lens, int32_t num_reqs, int32_t len) {
  for (int32_t i = 0; i < num_reqs; ++i) {
    if (query_lens[i] != len && query_lens[i] != 0) return false;
  }
  return true;
}

}  // namespace

BatchSplit split_decodes_and_prefills(const CommonAttentionMetadata& batch, int32_t decode_threshold,
                                      bool require_uniform) {
  const QueryLens query_lens(batch);
  const int32_t num_reqs = batch.num_reqs;
  // One token each is uniform anyway, so the lengths need not be looked at.
  const bool any_length_will_do = !require_uniform || decode_threshold <= 1;
  if (num_reqs == 0 || (batch.max_query_len <= decode_threshold && any_length_will_do)) return all_decodes(batch);

  const int32_t first_len = query_lens[0];
  if (first_len > decode_threshold) return {0, num_reqs, 0, batch.num_actual_tokens};
  if (require_uniform && is_uniform(query_lens, num_reqs, first_len)) {
    core::require(int64_t{num_reqs} * first_len == batch.num_actual_tokens, "tokens not padded correctly: ", num_reqs,
                  " requests of ", first_len, " query tokens, num_actual_tokens is ", batch.num_actual_tokens);
    return all_decodes(batch);
  }

  int32_t num_decodes = 0;
  while (num_decodes < num_reqs) {
    const int32_t len = query_lens[num_decodes];
    if (require_uniform ? len != first_len : len > decode_threshold) break;
    ++num_decodes;
  }
  if (num_decodes == num_reqs) return all_decodes(batch);
  const int32_t num_decode_tokens = query_lens.start(num_decodes);
  return {num_decodes, num_reqs - num_decodes, num_decode_tokens, batch.num_actual_tokens - num_decode_tokens};
}

ExtendSplit split_decodes_prefills_and_extends(const CommonAttentionMetadata& batch, int32_t decode_threshold) {
  const QueryLens query_lens(batch);
  const std::span<const int32_t> seq_lens = batch.where == Where::kHost ? batch.seq_lens : batch.seq_lens_host;
  const int32_t num_reqs = batch.num_reqs;
  core::require(seq_lens.size() >= static_cast<size_t>(num_reqs), "seq_lens on the host has ", seq_lens.size(),
                " entries; num_reqs is ", num_reqs);
  int32_t first_extend = 0;
  while (first_extend < num_reqs && query_lens[first_extend] <= decode_threshold) ++first_extend;
  int32_t first_prefill = first_extend;
  const auto has_context = [&](int32_t i) {
    return query_lens[i] <= decode_threshold || seq_lens[static_cast<size_t>(i)] != query_lens[i];
  };
  while (first_prefill < num_reqs && has_context(first_prefill)) ++first_prefill;

  ExtendSplit split;
  split.num_decodes = first_extend;
  split.num_extends = first_prefill - first_extend;
  split.num_prefills = num_reqs - first_prefill;
  // A section that reaches the batch's end has its padded tokens too.
  const auto section_start = [&](int32_t i) { return i < num_reqs ? query_lens.start(i) : batch.num_actual_tokens; };
  split.num_decode_tokens = section_start(first_extend);
  split.num_extend_tokens = section_start(first_prefill) - section_start(first_extend);
  split.num_prefill_tokens = batch.num_actual_tokens - section_start(first_prefill);
  return split;
}

}  // namespace folio::inline v0::backends
