#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "folio/context.hpp"
#include "folio/distributed/process_group.hpp"
#include "folio/merge.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

/// How ranks combine their partial results of all heads into whole results of their own heads. The results are the same
/// up to rounding; both add in float32.
enum class DcpCombine : int32_t {
  kAllGatherReduceScatter = 0,  ///< gathers LSEs, weighs, reduce-scatters float32 outputs: two operations
  kAllToAll = 1,  ///< sends every rank its heads, each row with its LSE, in the partials' dtype: one operation
};

/// "ag_rs" and "a2a", the values of vLLM's dcp_comm_backend. Throws kInvalidArgument for other names, and for "a2a"
/// where `world`, the decode_context_parallel_size, is 1.
FOLIO_API DcpCombine dcp_combine_from_name(std::string_view name, int32_t world);
FOLIO_API std::string_view to_string(DcpCombine combine);

/// Whether an engine should let every rank compute the queries of all ranks' heads (replicated weights) rather than
/// gather them: what was asked for or, without a wish, yes under "a2a"; never with one rank or under prefill context
/// parallelism too.
FOLIO_API bool use_replicated_queries(std::optional<bool> wish, DcpCombine combine, int32_t world,
                                      int32_t prefill_world);

/// Elements of a row's dtype that its float32 LSE takes behind the row's values: 1 for float32, 2 for float16 and
/// bfloat16, the low half first. Throws kInvalidArgument for other dtypes.
FOLIO_API int32_t lse_lanes(DType dtype);

/// Rows that take part as empty ones, whatever kernels left in them: those of requests that have no keys on this rank,
/// and those from query_start_loc[R] on (padding). Both are given or neither.
struct EmptyRows {
  std::span<const int32_t> local_seq_lens;   ///< [R], tokens of each request on this rank
  std::span<const int32_t> query_start_loc;  ///< [R + 1]
};

/// Sets the LSE of those rows to -infinity: element (t, h) of [num_tokens, num_heads], in place. Throws
/// kInvalidArgument for sizes that do not fit.
FOLIO_API void mask_empty_rows(const EmptyRows& rows, int32_t num_tokens, int32_t num_heads, const LseView& lse);

/// The same on a context's device. On a GPU everything lies in its memory, `rows` included, which is not checked there,
/// and the work is enqueued on `stream`.
FOLIO_API void mask_empty_rows(const Context& context, const EmptyRows& rows, int32_t num_tokens, int32_t num_heads,
                               const LseView& lse, Stream stream = {});

/// Bytes of workspace (256-byte aligned) that suffice for any of the functions below. O(1).
/// Throws kInvalidArgument on negative sizes and on overflow.
FOLIO_API size_t combine_workspace_size(int32_t world, int64_t num_tokens, int32_t num_heads, int32_t head_dim);

/// Combines the partial results that the ranks of `group` have of the same queries over disjoint keys, by the rule of
/// merge_state. Collective: all ranks give equal sizes and the same LseBase.
///
/// `partial`: [T, H, D], float32, float16 or bfloat16, H the heads of all ranks, rank r's at [r * H/W, (r + 1) * H/W).
/// `out`: [T, H/W, D], or [T, H, D] for the all-reduce form, float32, float16 or bfloat16; `lse`,
/// if wanted, has the same rows, in its own base. A partial whose LSE is infinite (either sign) or, as in vLLM, NaN is
/// empty and contributes nothing, whatever its values; all empty: out 0, LSE -infinity. With one rank the partial is
/// the result. Neither output may overlap the partial. Allocates nothing.
/// On a GPU everything lies in device memory, `empty` included, which is not checked there, and so does the group's
/// (ThreadGroupOptions::context); the work is enqueued on `stream`.
///
/// Throws, before anything is sent: kInvalidArgument where shapes do not fit, "H=6 must be divisible by DCP world size
/// 4."; kWorkspaceTooSmall. And as the group's operations do.
FOLIO_API void cp_lse_ag_out_rs(const Context& context, ProcessGroup& group, const AttentionStateView& partial,
                                TensorView out, LseView lse, Workspace workspace, const EmptyRows& empty = {},
                                Stream stream = {});
/// As above, with an all-reduce: every rank gets all heads. H need not be divisible.
FOLIO_API void cp_lse_ag_out_ar(const Context& context, ProcessGroup& group, const AttentionStateView& partial,
                                TensorView out, LseView lse, Workspace workspace, const EmptyRows& empty = {},
                                Stream stream = {});
/// As the first, with one all-to-all.
FOLIO_API void dcp_a2a_lse_reduce(const Context& context, ProcessGroup& group, const AttentionStateView& partial,
                                  TensorView out, LseView lse, Workspace workspace, const EmptyRows& empty = {},
                                  Stream stream = {});

}  // namespace folio::inline v0::distributed
