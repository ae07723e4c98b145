#pragma once

#include <cstdint>
#include <span>

#include "folio/reference.hpp"
#include "folio/types/attention.hpp"

/// The oracle: attention in float64, straight from the definitions, without the scheduler's or the kernels' arithmetic.
/// Slow (every row walks every key of its request) and meant for reading; it checks nothing that `run` checks. One row:
/// folio/reference.hpp.
namespace folio::inline v0::verify {

/// Every token that has a request: out is [num_tokens, num_q_heads, head_dim_v], lse [num_tokens, num_q_heads] or
/// empty. Entries of padding tokens are left as they are.
void reference_attention(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args,
                         std::span<double> out, std::span<double> lse);

/// The same walk with every operation in float32: what a plain computation in that precision achieves, with sums over
/// keys that do not drift. Its distance from the oracle is the yardstick for a kernel's error; it is no oracle itself.
void plain_attention(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args,
                     std::span<float> out, std::span<float> lse);

}  // namespace folio::inline v0::verify
