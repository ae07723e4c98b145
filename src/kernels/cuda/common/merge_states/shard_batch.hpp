#pragma once

#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/device.hpp"
#include "kernels/cuda/common/merge_states/gather_header.hpp"
#include "scheduler/mask_bounds.hpp"

/// A batch whose lengths lie on a GPU, as one rank plans it: which keys it reads from its shard and which from the new
/// tokens. All addresses are the device's. Every `enqueue` throws Error(kDeviceError) where the launch fails.
namespace folio::inline v0::kernels::cuda {

/// What one request's lengths are on one rank.
struct RequestShard {
  int32_t first_pos;   ///< global position of the first new token
  int32_t cached_len;  ///< this rank's tokens of what is read from the cache; -1: lengths that cannot be
  int32_t fresh_len;   ///< new tokens that are read beside it; -1 likewise
};

/// On both devices. `from_cache`: all keys are. Lengths that cannot be, or above max_seq_len, give -1.
FOLIO_HOST_DEVICE constexpr RequestShard request_shard(int64_t q_len, int32_t seq_len, bool from_cache,
                                                       bool cross_attention, int32_t max_seq_len,
                                                       const KvShard& shard) {
  if (q_len < 0 || seq_len < (cross_attention ? 0 : q_len) || seq_len > max_seq_len) return {0, -1, -1};
  const int64_t older = seq_len - q_len;  // before the first key, of an encoder shorter than that
  const int64_t cached = scheduler::shard_count_below(shard, from_cache ? seq_len : older);
  return {static_cast<int32_t>(older), static_cast<int32_t>(cached), static_cast<int32_t>(from_cache ? 0 : q_len)};
}

struct ShardBatchParams {
  const int32_t* cu_q = nullptr;      ///< [num_requests + 1]
  const int32_t* seq_lens = nullptr;  ///< [num_requests], over all ranks
  int32_t num_requests = 0;
  int32_t num_cached = 0;  ///< the first requests, which read all keys from the cache
  bool cross_attention = false;
  int32_t max_seq_len = 0;
  KvShard shard;
  int32_t* first_pos = nullptr;    ///< [num_requests], as RequestShard
  int32_t* cached_len = nullptr;   ///< likewise
  int32_t* fresh_len = nullptr;    ///< likewise
  GatherHeader* header = nullptr;  ///< its digest becomes `digest` and that of cu_q and seq_lens
  uint64_t digest = 0;
};
void enqueue(const ShardBatchParams& params, Stream stream);

/// Compares the headers that the ranks have sent.
struct CompareHeadersParams {
  GatheredHeaders gathered;
};
void enqueue(const CompareHeadersParams& params, Stream stream);

}  // namespace folio::inline v0::kernels::cuda
