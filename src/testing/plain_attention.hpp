#pragma once

#include <vector>

#include "testing/problem.hpp"

namespace folio::inline v0::verify {

/// Attention of a problem, row by row: out [tokens, num_q_heads, head_dim_v], the rest [tokens, num_q_heads].
template <typename Real>
struct AttentionResult {
  std::vector<Real> out;     ///< real values, not rounded to the output's dtype
  std::vector<Real> lse;     ///< natural logarithm
  std::vector<Real> weight;  ///< largest component of the weighted mean of |v|: the size that errors are relative to
  Real largest_logit = 0;    ///< of all visible |logits|, before the soft cap too
  Real largest_terms = 0;    ///< of all visible keys, the sum of |q_i k_i|, scaled as the logit is
  int32_t most_keys = 0;     ///< of a request
  /// Of all visible keys, the sum, over each 32 components, of the largest |q_i k_i| among them or |sum before them|,
  /// scaled as the logit is: what FP8 MMA lose bits of.
  Real largest_steps = 0;
  Real largest_value = 0;  ///< of all visible keys' |v|, scaled
};

/// What a careful programmer writes: float32 throughout, keys in order, the standard library's exp and tanh, and sums
/// over keys that do not drift with their number (nested_sum.hpp). Its error is the yardstick of every kernel's
/// (compare.hpp). It reads the problem's numbers, not the memory and views that kernels and the oracle read: so it also
/// checks those who build and read the views.
AttentionResult<float> plain_attention(const Problem& problem);

/// The same in float64, for the oracle's own check.
AttentionResult<double> plain_attention_double(const Problem& problem);

}  // namespace folio::inline v0::verify
