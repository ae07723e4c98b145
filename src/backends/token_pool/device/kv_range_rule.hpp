#pragma once

#include <cstdint>

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"

/// Which keys of a request a wrapper reads from the cache: constexpr, for one request, so that a device builds its
/// lists by the rule that the host plans by.
namespace folio::inline v0::backends::token_pool {

/// What a wrapper's layers see.
enum class WrapperRole : int32_t {
  kFull = 0,    ///< every key before the query
  kWindow = 1,  ///< those in the window
  kSelf = 2,    ///< kFull, behind the encoder's slots of the row
  kCross = 3,   ///< the encoder's keys
};

/// The lengths of a step, [num_requests] each.
struct KvRangeJob {
  const int32_t* seq_lens = nullptr;
  const int32_t* prefix_lens = nullptr;   ///< extends; null: `queries` a request
  const int32_t* encoder_lens = nullptr;  ///< kSelf, kCross
  int32_t num_requests = 0;
  int32_t queries = 1;  ///< of a request that is no extend
  int32_t drafts = 0;   ///< tokens behind seq_lens: `queries` in target verify, else 0
  WrapperRole role = WrapperRole::kFull;
  bool ragged = false;  ///< new tokens' keys are not read from the cache
  int32_t window_left = -1;
  int32_t page_size = 1;
  KvShard shard;  ///< the rank's share of every sequence, and of every encoder's tokens
};

struct KvRange {
  int32_t q_len = 0;
  int32_t len = 0;          ///< tokens read from the cache, of this rank
  int32_t whole_len = 0;    ///< keys that the request has after the step, over all ranks
  int32_t first_pos = 0;    ///< position in the sequence of the first
  int32_t table_start = 0;  ///< where it stands in the row of the request table
};

/// How many of a sequence's first `tokens` lie on the rank; what is no number of tokens stays as it is.
FOLIO_HOST_DEVICE constexpr int32_t own_tokens(const KvShard& shard, int32_t tokens) {
  if (shard.world == 1 || tokens <= 0) return tokens;
  const int64_t stripe = int64_t{shard.world} * shard.interleave;
  const int64_t begun = tokens % stripe - int64_t{shard.rank} * shard.interleave;
  const int64_t of_begun = begun < 0 ? 0 : (begun < shard.interleave ? begun : shard.interleave);
  return static_cast<int32_t>(tokens / stripe * shard.interleave + of_begun);
}

FOLIO_HOST_DEVICE constexpr KvRange kv_range(const KvRangeJob& job, int32_t r) {
  const int32_t end = job.seq_lens[r] + job.drafts;
  const int32_t first_query = job.prefix_lens != nullptr ? job.prefix_lens[r] : end - job.queries;
  KvRange range;
  range.q_len = end - first_query;
  if (job.role == WrapperRole::kCross) {
    range.whole_len = job.encoder_lens[r];
    range.len = own_tokens(job.shard, range.whole_len);
    return range;
  }
  range.whole_len = end;
  const int32_t window_left = job.role == WrapperRole::kWindow ? job.window_left : -1;
  range.first_pos = static_cast<int32_t>(window_start(first_query, window_left, job.page_size));
  // A divided sequence is listed whole: what its plan leaves out, it finds by positions.
  range.len = own_tokens(job.shard, (job.ragged ? first_query : end) - range.first_pos);
  range.table_start =
      range.first_pos + (job.role == WrapperRole::kSelf ? own_tokens(job.shard, job.encoder_lens[r]) : 0);
  return range;
}

/// Tokens of the last page; 1 where there is none: FlashInfer takes 0 for a full page.
FOLIO_HOST_DEVICE constexpr int32_t last_page_len(int32_t len, int32_t page_size) {
  return len == 0 ? 1 : (len - 1) % page_size + 1;
}

}  // namespace folio::inline v0::backends::token_pool
