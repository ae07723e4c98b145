#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/op_state.hpp"
#include "folio/distributed/lse_combine.hpp"

namespace folio::inline v0::distributed {

/// What a NaN LSE stands for.
enum class NanLse : int32_t {
  kPropagates,  ///< a bad input: the row becomes NaN
  kIsEmpty,     ///< a kernel that had no keys
};

/// A combine, its arguments checked.
struct CombineCall {
  const Context& context;
  ProcessGroup& group;
  AttentionStateView partial;  ///< [T, H, D]
  /// How the heads of the ranks interleave: with G groups, the heads of KV head k are rank 0's, then rank 1's and so
  /// on. 1: rank r's heads stand together.
  int32_t head_groups = 1;
  NanLse nan = NanLse::kPropagates;
  EmptyRows empty = {};
  TensorView out = {};
  LseView lse = {};
  Workspace workspace = {};
  Stream stream = {};

  /// Null on a CPU.
  const attention::GpuBackend* gpu() const { return context.state().gpu.get(); }
  int64_t num_tokens() const { return partial.out.shape[0]; }
  int32_t num_heads() const { return static_cast<int32_t>(partial.out.shape[1]); }
  int32_t head_dim() const { return static_cast<int32_t>(partial.out.shape[2]); }
  int32_t local_heads() const { return num_heads() / group.size(); }

  /// Where rank r's head h stands among all heads.
  int32_t head_of(int32_t r, int32_t h) const {
    return kernels::cuda::head_place({r, h}, group.size(), local_heads(), head_groups);
  }
};

/// How much of a combine's workspace each of its parts takes. One rule for the size and for the carving.
struct CombineParts {
  size_t lse = 0;       ///< this rank's LSEs, cleaned: float [T, H]
  size_t gathered = 0;  ///< everybody's: float [W, T, H]
  size_t send = 0;      ///< [T, H, D] float32, or rows with their LSE
  size_t received = 0;
  size_t total() const { return lse + gathered + send + received; }
};
CombineParts combine_parts(int32_t world, int64_t num_tokens, int32_t num_heads, int32_t head_dim);

/// Throws for a workspace that is too small or not aligned.
void check_workspace(const CombineCall& call);

/// Runs body(begin, end) over ranges of [0, rows), on the context's executor.
template <typename Body>
void for_rows(const Context& context, int64_t rows, int64_t elements_per_row, const Body& body) {
  constexpr int64_t kMinElementsPerItem = 16384;  // below, a parallel region costs more than it saves
  struct Work {
    const Body& body;
    int64_t rows, step;
  } work{body, rows,
         std::max(kMinElementsPerItem / std::max<int64_t>(elements_per_row, 1) + 1,
                  rows / (int64_t{4} * context.concurrency()) + 1)};
  context.parallel_for((rows + work.step - 1) / work.step,
                       [](void* self, int64_t item) noexcept {
                         const Work& w = *static_cast<const Work*>(self);
                         w.body(item * w.step, std::min(w.rows, (item + 1) * w.step));
                       },
                       &work);
}

/// Copies the partial's LSEs to `cleaned` [T, H], packed: infinities of either sign, NaN where it counts as empty, and
/// the rows of CombineCall::empty become -infinity.
void clean_lses(const CombineCall& call, float* cleaned);

void all_gather_reduce_scatter(const CombineCall& call);
void all_gather_all_reduce(const CombineCall& call);
void all_to_all_combine(const CombineCall& call);
/// Every rank gets all heads: an all-to-all of partial results, and an all-gather of what each rank makes of its own
/// heads' in their dtype.
void all_to_all_all_gather(const CombineCall& call);

}  // namespace folio::inline v0::distributed
