#pragma once

#include <cstdint>
#include <span>

#include "folio/backends/token_pool/device_faults.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"

/// Lists of slots for the steps of a draft model that extends every request along topk branches: at step t (from 1 on)
/// a branch attends to its request's tokens and to the t draft tokens of its own.
///
/// Behaviour after SGLang's FlashInferMultiStepDraftBackend and its generate_draft_decode_kv_indices; that one had rows
/// too short by the factor topk once, and wrote behind them. Host memory, unless a function takes DeviceFaults; nothing
/// is allocated.
namespace folio::inline v0::backends {

/// How a request's row of the request table goes on behind its tokens: the slots of all branches, which the engine has
/// allocated before the first step. With n tokens in the row:
/// - page_size 1 or topk 1: branch k's draft tokens are at positions n + k * num_steps + (0 .. num_steps - 1).
/// - else every branch has pages of its own, from the begin of the page that the tokens end in, of whose tokens the
///   engine copies keys and values into each branch's first page: with last = n % page_size and P = ceil((last +
///   num_steps) / page_size), at positions n - last + k * P * page_size + last + (0 .. num_steps - 1).
struct DraftBranches {
  int32_t topk = 1;       ///< branches a request
  int32_t num_steps = 1;  ///< draft tokens of a branch that the row has room for
  int32_t page_size = 1;  ///< tokens of a page of the allocator; entries are slots whatever it is
};

/// Entries of all branches at a step: topk * (sum of lengths + batch_size * step). O(1). Throws kInvalidArgument for
/// branches below 1, negative numbers, steps outside [1, num_steps] and more than 2^31 - 1 entries, which indptr cannot
/// count.
FOLIO_API int64_t draft_kv_indices_len(int64_t sum_lens, int32_t batch_size, const DraftBranches& branches,
                                       int32_t step);

/// Entries that a row of DraftKvIndices::kv_indices needs for any batch: max_batch_size * topk * max_context_len, where
/// max_context_len counts draft tokens too. O(1). Throws as above.
FOLIO_API int64_t draft_kv_indices_capacity(int32_t max_batch_size, const DraftBranches& branches,
                                            int32_t max_context_len);

/// Positions that the row of a request with `len` tokens needs: one behind the last draft token of the last branch.
/// O(1). Throws as above.
FOLIO_API int64_t draft_row_columns(int32_t len, const DraftBranches& branches);

/// What generate_draft_decode_kv_indices reads, all borrowed. B requests.
struct DraftKvIndicesArgs {
  PageTableView req_to_token;                  ///< the request table: dense, a slot per position
  std::span<const int32_t> req_pool_indices;   ///< [B], rows
  std::span<const int32_t> paged_kernel_lens;  ///< [B], tokens before the draft's, from kv_start_idx on
  std::span<const int32_t> kv_start_idx;       ///< [B], the first position read (a window); empty = 0 for all
  DraftBranches branches;
  int32_t num_iterations = 0;  ///< steps to fill, in [0, num_steps]: t = 1 .. num_iterations
  int64_t num_slots = 0;       ///< given (> 0): every slot read must be in [0, num_slots). 0: slots are not looked at
};

/// Where it writes: a row for each step, row t - 1 for step t.
struct DraftKvIndices {
  std::span<int32_t> kv_indptr;   ///< [num_iterations, kv_indptr_stride]; a row's first B * topk + 1 are written
  int64_t kv_indptr_stride = 0;   ///< >= B * topk + 1; ReqToTokenPool rows times topk, plus 1, suits all batches
  std::span<int32_t> kv_indices;  ///< [num_iterations, kv_indices_stride]
  int64_t kv_indices_stride = 0;  ///< >= draft_kv_indices_len at the last step
};

/// For every step t and branch (i, k), the requests in order and the branches of each in order: kv_indptr[t - 1][i *
/// topk + k], and from there on in kv_indices[t - 1] the slots of the request's tokens and of the branch's first t
/// draft tokens. Nothing else is written. O(steps * entries). Throws kInvalidArgument naming the request, or what is
/// too small, before anything is written.
FOLIO_API void generate_draft_decode_kv_indices(const DraftKvIndicesArgs& args, const DraftKvIndices& out);

/// The same on the device of `faults` (DeviceFaults), where all arrays lie; up to 65535 steps. Rows of kv_indices have
/// room for the batch whatever its lengths, as draft_kv_indices_capacity says; what does not fit is not written, and
/// offsets end with the row. A request that would be refused has the dummy slot for each of its entries, and so has a
/// slot outside the pool; a length that no row has counts as 0.
FOLIO_API void generate_draft_decode_kv_indices(const DraftKvIndicesArgs& args, const DraftKvIndices& out,
                                                DeviceFaults& faults, Stream stream = {});

}  // namespace folio::inline v0::backends
