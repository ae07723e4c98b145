#pragma once

#include <cstdint>
#include <span>

#include "folio/types/attention.hpp"
#include "folio/types/error.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::verify {

/// One row of attention by the float64 oracle: token `token` and q head `q_head` of a batch, straight from the
/// definitions, with none of the scheduler's or the kernels' arithmetic. For checking results; slow: it walks every key
/// of the request.
///
/// Writes the output, before any rounding to `config.out`, to out[head_dim_v]; returns the log-sum-exp in base e,
/// -infinity where no key is visible to the row and it has no sink. Dtypes come from the views in `args`, of which
/// `out` and `lse` are not used. Host memory only. It checks little: give it what `run` accepts. Throws
/// kInvalidArgument for a token without a request or a head out of range, kUnsupported for what it does not know.
FOLIO_API double reference_row(const AttentionConfig& config, const BatchView& batch, const AttentionArgs& args,
                               int32_t token, int32_t q_head, std::span<double> out);

}  // namespace folio::inline v0::verify
