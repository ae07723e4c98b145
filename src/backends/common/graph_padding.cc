#include "folio/backends/graph_padding.hpp"

#include <algorithm>

#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {

int32_t default_max_capture_size(int32_t max_num_seqs, int32_t tokens_per_decode, int32_t limit) {
  core::require(max_num_seqs >= 1 && tokens_per_decode >= 1 && limit >= 1, "max_num_seqs is ", max_num_seqs,
                ", tokens_per_decode ", tokens_per_decode, ", limit ", limit, "; each must be at least 1");
  // In double: the product of three 32-bit numbers may leave 64 bits, and only its place relative to the limit counts.
  const double wanted = 2.0 * max_num_seqs * tokens_per_decode;
  return wanted < limit ? static_cast<int32_t>(wanted) : limit;
}

std::vector<int32_t> default_capture_sizes(int32_t max_capture_size) {
  core::require(max_capture_size >= 1, "max_capture_size is ", max_capture_size, "; it must be at least 1");
  std::vector<int32_t> sizes;
  const auto step_of = [](int64_t size) -> int64_t { return size < 4 ? size : size < 8 ? 4 : size < 256 ? 8 : 16; };
  for (int64_t size = 1; size <= max_capture_size; size += step_of(size)) sizes.push_back(static_cast<int32_t>(size));
  return sizes;
}

GraphPadding::GraphPadding(std::span<const int32_t> capture_sizes) {
  core::require(!capture_sizes.empty(), "capture_sizes is empty; graphs need at least one");
  int32_t last = 0;
  for (int32_t size : capture_sizes) {
    core::require(size > last, "capture_sizes has ", size, " after ", last, "; sizes ascend from 1 on");
    last = size;
  }
  padded_.reserve(static_cast<size_t>(last) + 1);
  padded_.push_back(0);
  for (int32_t size : capture_sizes) padded_.resize(static_cast<size_t>(size) + 1, size);
}

int32_t GraphPadding::pad_for_cudagraph(int32_t num_tokens) const {
  core::require(num_tokens >= 0 && num_tokens <= max_capture_size(), "a batch of ", num_tokens,
                " tokens; the largest captured size is ", max_capture_size());
  return padded_[static_cast<size_t>(num_tokens)];
}

int32_t fa3_scheduler_metadata_size(int32_t num_reqs) {
  core::require(num_reqs >= 0, "num_reqs is ", num_reqs, "; it must not be negative");
  return core::checked_cast<int32_t>(1 + (int64_t{num_reqs} + 3) / 4 * 4 * 4);
}

GraphPadValues consolidate_pad_values(std::span<const GraphPadValues> builders) noexcept {
  GraphPadValues result;
  for (const GraphPadValues& values : builders) {
    result.seq_len = std::max(result.seq_len, values.seq_len);
    result.page_id = std::max(result.page_id, values.page_id);
  }
  return result;
}

void pad_seq_lens(std::span<int32_t> seq_lens, int32_t num_reqs, const GraphPadValues& values) {
  core::require(num_reqs >= 0 && static_cast<size_t>(num_reqs) <= seq_lens.size(), "num_reqs is ", num_reqs,
                "; seq_lens has ", seq_lens.size(), " entries");
  std::ranges::fill(seq_lens.subspan(static_cast<size_t>(num_reqs)), values.seq_len);
}

}  // namespace folio::inline v0::backends
