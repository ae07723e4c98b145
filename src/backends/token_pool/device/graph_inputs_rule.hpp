#pragma once

#include <cstdint>

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "folio/types/export.hpp"

/// A captured batch's inputs, one request at a time: the batch's own in front, padding behind. Constexpr: host and
/// device fill them by one rule.
namespace folio::inline v0::backends::token_pool {

inline constexpr int32_t kPadLength = 1;  ///< TokenPoolBackend::get_cuda_graph_seq_len_fill_value

/// An input: what the batch has of it, and where it goes.
template <typename T>
struct GraphInput {
  const T* from = nullptr;
  T* to = nullptr;  ///< null: not wanted

  FOLIO_HOST_DEVICE constexpr void fill(int64_t i, bool own, T padding) const {
    if (to != nullptr) to[i] = own ? from[i] : padding;
  }
};

struct GraphInputsJob {
  int32_t num_requests = 0;
  int32_t padded = 0;              ///< requests with padding
  int32_t tokens_per_request = 1;  ///< of out_cache_loc and the tree
  GraphInput<int32_t> rows, seq_lens, encoder_lens;
  GraphInput<int64_t> slots, window_slots;
  GraphInput<uint8_t> tree;

  FOLIO_HOST_DEVICE constexpr int64_t tree_bytes() const {
    return (int64_t{tokens_per_request} * tokens_per_request + 7) / 8;
  }
};

/// Byte `byte` of a chain's bits: draft `row` sees drafts 0 to `row`.
FOLIO_HOST_DEVICE constexpr uint8_t chain_byte(int32_t drafts, int64_t byte) {
  uint32_t bits = 0;
  for (int32_t i = 0; i < 8; ++i) {
    const int64_t bit = byte * 8 + i;
    const int64_t row = bit / drafts;
    if (row < drafts && bit % drafts <= row) bits |= 1u << i;
  }
  return static_cast<uint8_t>(bits);
}

/// Writes a thread's share of request `r`, of the batch or of the padding.
FOLIO_HOST_DEVICE constexpr void fill_graph_request(const GraphInputsJob& job, int32_t r, int32_t lane, int32_t lanes) {
  const bool own = r < job.num_requests;
  if (lane == 0) {
    job.rows.fill(r, own, kPaddingRow);
    job.seq_lens.fill(r, own, kPadLength);
    job.encoder_lens.fill(r, own, 0);
  }
  const int64_t token = int64_t{r} * job.tokens_per_request;
  for (int64_t t = token + lane; t < token + job.tokens_per_request; t += lanes) {
    job.slots.fill(t, own, kDummySlot);
    job.window_slots.fill(t, own, kDummySlot);
  }
  const int64_t bytes = job.tree_bytes();
  for (int64_t b = lane; job.tree.to != nullptr && b < bytes; b += lanes) {
    job.tree.fill(r * bytes + b, own, own ? uint8_t{0} : chain_byte(job.tokens_per_request, b));
  }
}

}  // namespace folio::inline v0::backends::token_pool
