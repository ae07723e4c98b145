#pragma once

#include <cstdint>
#include <optional>

#include "backends.hpp"

namespace folio::python {

/// What Python's CommonAttentionMetadata is made of.
struct BatchArguments {
  nb::object query_start_loc = nb::none(), seq_lens = nb::none(), block_table = nb::none(), slot_mapping = nb::none();
  std::optional<int32_t> num_reqs, num_actual_tokens, max_query_len, max_seq_len;
  bool causal = true;
  nb::object query_start_loc_host = nb::none(), seq_lens_host = nb::none(), block_table_host = nb::none(),
             seq_lens_host_upper_bound = nb::none();
  nb::object encoder_seq_lens = nb::none(), encoder_seq_lens_host = nb::none(), causal_per_request = nb::none(),
             logits_indices_padded = nb::none();
  int32_t num_logits_indices = 0;
  nb::object positions = nb::none(), is_prefilling = nb::none(), mm_req_doc_ranges = nb::none(),
             dcp_local_seq_lens = nb::none();
};

/// Reads the arrays and fills in what lengths on the host say. Throws Error(kInvalidArgument), nb::type_error.
CommonBatch make_common_batch(const BatchArguments& given);

}  // namespace folio::python
