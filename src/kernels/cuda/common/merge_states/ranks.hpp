#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/device.hpp"
#include "kernels/cuda/common/merge_states/gather_header.hpp"

/// What runs on a GPU around the exchanges of a group of ranks: queries side by side, LSEs, and the weighing, packing
/// and adding of partial results. All addresses are the device's. Every `enqueue` throws Error(kDeviceError) where the
/// launch fails.
namespace folio::inline v0::kernels::cuda {

/// Whose head stands at a place where the heads of each KV head are rank 0's, then rank 1's and so on.
struct HeadOwner {
  int32_t rank;
  int32_t head;  ///< among that rank's
};

/// On both devices. `heads`: of one rank; `groups`: KV heads, which divides it.
constexpr HeadOwner head_owner(int32_t place, int32_t ranks, int32_t heads, int32_t groups) {
  const int32_t per_group = heads / groups;
  return {place / per_group % ranks, place / (per_group * ranks) * per_group + place % per_group};
}
/// The place of an owner's head.
FOLIO_HOST_DEVICE constexpr int32_t head_place(const HeadOwner& owner, int32_t ranks, int32_t heads, int32_t groups) {
  const int32_t per_group = heads / groups;
  return (owner.head / per_group * ranks + owner.rank) * per_group + owner.head % per_group;
}

/// Puts the queries of several ranks beside each other on a GPU: to [num_tokens, ranks * heads] rows of row_bytes, in
/// which the heads of KV head k are rank 0's, then rank 1's and so on. And their slopes, [ranks * heads], likewise.
/// All addresses are the device's; strides are in bytes. `enqueue` throws Error(kDeviceError) where the launch fails.
struct ArrangeParams {
  const std::byte* from = nullptr;  ///< row (rank, token, head)
  int64_t rank_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  std::byte* to = nullptr;  ///< a place's owner: head_owner (head_order.hpp)
  int64_t num_tokens = 0;
  int32_t ranks = 1;
  int32_t heads = 1;   ///< of one rank
  int32_t groups = 1;  ///< KV heads; divides heads
  int64_t row_bytes = 0;
  float* slopes_to = nullptr;         ///< null: none are wanted
  const std::byte* slopes = nullptr;  ///< slope (rank, head), packed within a rank; null: zeros
  int64_t slopes_rank_stride = 0;
  SentHeader sent;           ///< written beside the queries of one rank
  GatheredHeaders gathered;  ///< compared beside the queries of all
};
void enqueue(const ArrangeParams& params, Stream stream);

/// lse [cu_q[num_requests], num_heads], base 2, gets slope[head] * first_pos[request] / ln 2 added, in place, in
/// double: from logits biased by distances to those biased by -slope * (row - key), where rows count from the request's
/// first query. All addresses are the device's.
struct ShiftLseParams {
  float* lse = nullptr;
  const int32_t* cu_q = nullptr;       ///< [num_requests + 1]
  const int32_t* first_pos = nullptr;  ///< [num_requests], the position of the first query
  const float* slopes = nullptr;       ///< [num_heads]
  int32_t num_requests = 0;
  int32_t num_heads = 0;
};

/// Throws Error(kDeviceError) where the launch fails.
void enqueue(const ShiftLseParams& params, Stream stream);

/// cleaned [num_tokens, num_heads]: -infinity for infinities of either sign, for NaN where it counts as empty, for
/// tokens of requests without keys here, and for those from query_start_loc[num_requests] on.
struct CleanLseParams {
  const float* lse = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  float* cleaned = nullptr;
  int64_t num_tokens = 0;
  int32_t num_heads = 0;
  bool nan_is_empty = false;
  const int32_t* local_seq_lens = nullptr;   ///< [num_requests]
  const int32_t* query_start_loc = nullptr;  ///< [num_requests + 1]; null: no such tokens
  int32_t num_requests = 0;
};
void enqueue(const CleanLseParams& params, Stream stream);

/// The LSEs of tokens of requests without keys here, and of those from query_start_loc[num_requests] on, become
/// -infinity, in place.
struct MaskRowsParams {
  const int32_t* local_seq_lens = nullptr;   ///< [num_requests]
  const int32_t* query_start_loc = nullptr;  ///< [num_requests + 1]
  int32_t num_requests = 0;
  float* lse = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t num_tokens = 0;
  int32_t num_heads = 0;
};
void enqueue(const MaskRowsParams& params, Stream stream);

/// How heads are dealt to ranks: rank r's head h stands at head_of(r, h) among all.
struct RankHeads {
  int32_t parts = 1;   ///< ranks that rows are sorted by
  int32_t local = 1;   ///< heads of each
  int32_t groups = 1;  ///< as CombineCall::head_groups
};

/// send [parts, num_tokens, local, head_dim] float32: this rank's values times what they weigh among all ranks'.
/// lse [num_tokens, local]: natural LSEs over all ranks of part `own`.
struct WeighParams {
  const float* gathered = nullptr;  ///< [world, num_tokens, num_heads], cleaned
  int32_t world = 1;
  int32_t rank = 0;
  int32_t own = 0;
  LseBase base = LseBase::kE;
  RankHeads heads;
  const std::byte* partial = nullptr;  ///< [num_tokens, num_heads, head_dim]
  DType dtype = DType::kUnset;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t num_tokens = 0;
  int32_t head_dim = 0;
  float* send = nullptr;
  float* lse = nullptr;
};
void enqueue(const WeighParams& params, Stream stream);

/// send: rows [parts, num_tokens, local] of row_elements elements: the values, and at element lse_at their LSE's bits.
struct PackParams {
  const float* cleaned = nullptr;  ///< [num_tokens, num_heads]
  RankHeads heads;
  const std::byte* partial = nullptr;
  DType dtype = DType::kUnset;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t num_tokens = 0;
  int32_t head_dim = 0;
  int64_t lse_at = 0;
  int64_t row_elements = 0;
  std::byte* send = nullptr;
};
void enqueue(const PackParams& params, Stream stream);

/// out[i] = the sum over ranks of sent[rank][i], in their order.
struct SumParams {
  static constexpr int32_t kMostRanks = 64;
  const float* sent[kMostRanks] = {};
  int32_t world = 1;
  int64_t count = 0;
  float* out = nullptr;
};
void enqueue(const SumParams& params, Stream stream);

}  // namespace folio::inline v0::kernels::cuda
