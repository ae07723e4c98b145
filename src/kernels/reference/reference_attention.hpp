#pragma once

#include <cstdint>
#include <span>

#include "folio/types/attention.hpp"

/// The oracle: attention in float64, straight from the definitions, without the scheduler's or the kernels' arithmetic.
/// Slow: every row visits every key of its request. Meant for reading; it checks nothing that `run` checks.
namespace folio::inline v0::kernels {

/// One query token and q head. Writes the output, before any rounding to `config.out` and without `out_scale`, to
/// out[head_dim_v] and returns the log-sum-exp in base e: -infinity where the row sees no key and has no sink.
///
/// `config` may leave ragged_kv and out unset; dtypes come from the views in `args`. Of `args`, q, segments, the
/// scales, masks and logit options are read; out and lse are not. Only keys and values that the row sees are read.
/// Throws kInvalidArgument for a token without a request or a head out of range.
double reference_row(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args, int32_t token,
                     int32_t q_head, std::span<double> out);

/// Every token that has a request: out is [num_tokens, num_q_heads, head_dim_v], lse [num_tokens, num_q_heads] or
/// empty. Entries of padding tokens are left as they are.
void reference_attention(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args,
                         std::span<double> out, std::span<double> lse);

/// The same loop with every operation in float32. Its distance from the oracle is the yardstick for a kernel's error;
/// it is no oracle itself.
void plain_attention(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args,
                     std::span<float> out, std::span<float> lse);

}  // namespace folio::inline v0::kernels
