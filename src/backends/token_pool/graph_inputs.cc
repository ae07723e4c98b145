#include "folio/backends/token_pool/graph_inputs.hpp"

#include <algorithm>
#include <numeric>

#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::require;

constexpr int32_t kPadLength = 1;  ///< TokenPoolBackend::get_cuda_graph_seq_len_fill_value

}  // namespace

std::vector<int32_t> capture_batch_sizes(int32_t max_running_requests) {
  require(max_running_requests >= 1, "max_running_requests is ", max_running_requests, "; it must be 1 or more");
  std::vector<int32_t> sizes;
  const auto next = [](int32_t size) {
    if (size < 4) return size * 2;
    if (size < 16) return size + 4;
    if (size < 256) return size + 8;
    return size < 496 ? size + 16 : size == 496 ? 512 : size + 32;
  };
  for (int32_t size = 1; size <= max_running_requests; size = next(size)) sizes.push_back(size);
  return sizes;
}

GraphInputs::GraphInputs(int32_t max_bs, int32_t tokens_per_request)
    : max_bs_(max_bs), tokens_per_request_(tokens_per_request) {
  require(max_bs >= 1 && tokens_per_request >= 1, "max_bs is ", max_bs, " and tokens_per_request ", tokens_per_request,
          "; both must be 1 or more");
  const auto requests = static_cast<size_t>(max_bs);
  const auto tokens = static_cast<size_t>(tokens_per_request);
  req_pool_indices_.resize(requests);
  seq_lens_.resize(requests);
  encoder_lens_.resize(requests);
  out_cache_loc_.resize(requests * tokens);
  window_out_cache_loc_.resize(requests * tokens);
  tree_mask_.resize(requests * ((tokens * tokens + 7) / 8));
}

ForwardBatch GraphInputs::pad(const ForwardBatch& batch, int32_t padded_bs) {
  require(is_decode_or_idle(batch.forward_mode) || is_target_verify(batch.forward_mode), "forward_mode is ",
          to_string(batch.forward_mode), "; decode, idle and target_verify are captured");
  require(batch.batch_size >= 0 && batch.batch_size <= padded_bs && padded_bs <= max_bs_, "a batch of ",
          batch.batch_size, " requests is padded to ", padded_bs, "; the inputs have room for ", max_bs_);
  require(!is_target_verify(batch.forward_mode) || batch.spec_info.draft_token_num == tokens_per_request_,
          "spec_info.draft_token_num is ", batch.spec_info.draft_token_num, "; the inputs are for ",
          tokens_per_request_, " tokens a request");
  require(batch.spec_info.kv_indptr.empty(), "spec_info.kv_indptr is given; draft rows are padded by who builds them");
  const auto requests = static_cast<size_t>(batch.batch_size);
  const auto padded = static_cast<size_t>(padded_bs);
  const auto tokens = static_cast<size_t>(tokens_per_request_);
  const auto fill = [](const auto& values, size_t count, size_t padded_count, auto padding, auto& to,
                       const char* name) {
    require(values.size() == count, name, " has ", values.size(), " entries; the batch has ", count);
    const auto end = std::copy(values.begin(), values.end(), to.begin());
    std::fill(end, to.begin() + static_cast<std::ptrdiff_t>(padded_count), padding);
    return std::span(to).first(padded_count);
  };
  ForwardBatch result = batch;
  result.batch_size = padded_bs;
  result.req_pool_indices = fill(batch.req_pool_indices, requests, padded, 0, req_pool_indices_, "req_pool_indices");
  result.seq_lens = fill(batch.seq_lens_cpu.empty() ? batch.seq_lens : batch.seq_lens_cpu, requests, padded, kPadLength,
                         seq_lens_, "seq_lens");
  result.seq_lens_cpu = result.seq_lens;
  result.seq_lens_sum = std::accumulate(result.seq_lens.begin(), result.seq_lens.end(), int64_t{0});
  result.out_cache_loc =
      fill(batch.out_cache_loc, requests * tokens, padded * tokens, int64_t{0}, out_cache_loc_, "out_cache_loc");
  if (!batch.window_out_cache_loc.empty()) {
    result.window_out_cache_loc = fill(batch.window_out_cache_loc, requests * tokens, padded * tokens, int64_t{0},
                                       window_out_cache_loc_, "window_out_cache_loc");
  }
  if (!batch.encoder_lens.empty() || !batch.encoder_lens_cpu.empty()) {
    result.encoder_lens = fill(batch.encoder_lens_cpu.empty() ? batch.encoder_lens : batch.encoder_lens_cpu, requests,
                               padded, 0, encoder_lens_, "encoder_lens");
    result.encoder_lens_cpu = result.encoder_lens;
  }
  if (!batch.spec_info.tree_mask.empty()) {
    const size_t block = (tokens * tokens + 7) / 8;
    result.spec_info.tree_mask =
        fill(batch.spec_info.tree_mask, requests * block, padded * block, uint8_t{0}, tree_mask_, "tree_mask");
    for (size_t r = requests; r < padded; ++r) {
      for (size_t row = 0; row < tokens; ++row) {
        for (size_t column = 0; column <= row; ++column) {
          uint8_t& byte = tree_mask_[r * block + (row * tokens + column) / 8];
          byte = static_cast<uint8_t>(byte | (1u << ((row * tokens + column) % 8)));
        }
      }
    }
    if (!batch.spec_info.tree_mask_cpu.empty()) result.spec_info.tree_mask_cpu = result.spec_info.tree_mask;
  }
  return result;
}

}  // namespace folio::inline v0::backends
