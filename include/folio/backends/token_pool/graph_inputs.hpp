#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "folio/backends/token_pool/forward_batch.hpp"
#include "folio/context.hpp"
#include "folio/types/device.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// The batch sizes that pymllm captures for up to `max_running_requests` requests, ascending: 1, 2, 4, 8, 12, every 8th
/// from 16 to 256, every 16th to 496, every 32nd from 512 on; none above, but always 1. GraphPadding finds a batch's.
/// Throws kInvalidArgument for a number below 1.
FOLIO_API std::vector<int32_t> capture_batch_sizes(int32_t max_running_requests);

/// A captured batch's inputs in memory that stays where it is, and the padding that fills it up. Padding requests have
/// length 1 and the dummy row 0, and their tokens the dummy slot 0: what they compute reads and writes what is
/// nobody's. Every call sets all of the padding anew: nothing is left of larger batches before.
///
/// Of a GPU's context the memory is the device's: graphs are captured over it, and a call enqueues one kernel that
/// fills it. Nothing waits, and nothing is allocated once warm. Not thread-safe.
class FOLIO_API GraphInputs {
 public:
  /// Batches of up to max_bs requests with `tokens_per_request` queries each (target verify: the drafts), in host
  /// memory. Throws kInvalidArgument for numbers below 1.
  explicit GraphInputs(int32_t max_bs, int32_t tokens_per_request = 1);

  /// The same in the memory of the context's device. Throws kUnavailable and kOutOfMemory besides.
  GraphInputs(const Context& context, int32_t max_bs, int32_t tokens_per_request = 1);

  ~GraphInputs();
  GraphInputs(GraphInputs&&) noexcept;
  GraphInputs& operator=(GraphInputs&&) noexcept;

  /// The batch with padding up to padded_bs requests, in this object's memory: req_pool_indices, seq_lens,
  /// out_cache_loc, window_out_cache_loc, encoder_lens (0) and tree masks (chains) where the batch has them; the copies
  /// on the host of those that the batch has a copy of; and seq_lens_sum with the padding's, if the host knows it (-1).
  /// Decodes and target verify. Arrays lie where ForwardBatch says: on a GPU's context there. Valid until the next
  /// call. Throws kInvalidArgument for other modes and sizes; nothing is then written.
  ForwardBatch pad(const ForwardBatch& batch, int32_t padded_bs, Stream stream = {});

  /// The same of a batch whose arrays all lie on the host, as schedulers make it; copies on the host come with it. They
  /// may be changed on return. Throws kInvalidArgument besides for a stream under capture.
  ForwardBatch pad_from_host(const ForwardBatch& batch, int32_t padded_bs, Stream stream = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace folio::inline v0::backends
