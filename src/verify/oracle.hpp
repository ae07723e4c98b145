#pragma once

#include "verify/batch_memory.hpp"
#include "verify/plain_attention.hpp"
#include "verify/problem.hpp"

namespace folio::inline v0::verify {

/// The float64 oracle's answer to a batch, read from the very views that kernels get; for the whole of `problem`.
AttentionResult<double> oracle_attention(const Problem& problem, const BatchMemory& batch);

}  // namespace folio::inline v0::verify
