#include "testing/oracle.hpp"

#include "testing/reference_attention.hpp"

namespace folio::inline v0::verify {

AttentionResult<double> oracle_attention(const Problem& problem, const BatchMemory& batch) {
  const auto heads = static_cast<size_t>(problem.config.num_q_heads);
  const auto dim = static_cast<size_t>(problem.config.head_dim_v);
  const auto rows = static_cast<size_t>(batch.num_tokens()) * heads;
  const auto padded_rows = static_cast<size_t>(batch.view().num_tokens) * heads;
  AttentionResult<double> result;
  result.out.resize(padded_rows * dim);
  result.lse.resize(padded_rows);
  reference_attention(problem.config, batch.view(), batch.args(), result.out, result.lse);
  result.out.resize(rows * dim);
  result.lse.resize(rows);
  return result;
}

}  // namespace folio::inline v0::verify
