#pragma once

#include <cstdint>
#include <vector>

#include "folio/backends/token_pool/forward_batch.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// The batch sizes that pymllm captures for up to `max_running_requests` requests, ascending: 1, 2, 4, 8, 12, every 8th
/// from 16 to 256, every 16th to 496, every 32nd from 512 on; none above, but always 1. GraphPadding finds a batch's.
/// Throws kInvalidArgument for a number below 1.
FOLIO_API std::vector<int32_t> capture_batch_sizes(int32_t max_running_requests);

/// A captured batch's inputs in host memory that stays where it is, and the padding that fills it up. Padding requests
/// have length 1 and the dummy row 0, and their tokens the dummy slot 0: what they compute reads and writes what is
/// nobody's. Every call sets all of the padding anew: nothing is left of larger batches before.
class FOLIO_API GraphInputs {
 public:
  /// Batches of up to max_bs requests with `tokens_per_request` queries each (target verify: the drafts). Throws
  /// kInvalidArgument for numbers below 1.
  explicit GraphInputs(int32_t max_bs, int32_t tokens_per_request = 1);

  /// The batch with padding up to padded_bs requests, in this object's memory: req_pool_indices, seq_lens, seq_lens_sum
  /// with the padding's, out_cache_loc, window_out_cache_loc, encoder_lens (0) and tree masks (chains) where the batch
  /// has them. Decodes and target verify, on the host. Valid until the next call. Throws kInvalidArgument for other
  /// modes and sizes.
  ForwardBatch pad(const ForwardBatch& batch, int32_t padded_bs);

 private:
  int32_t max_bs_;
  int32_t tokens_per_request_;
  std::vector<int32_t> req_pool_indices_, seq_lens_, encoder_lens_;
  std::vector<int64_t> out_cache_loc_, window_out_cache_loc_;
  std::vector<uint8_t> tree_mask_;
};

}  // namespace folio::inline v0::backends
