#pragma once

#include "testing/batch_memory.hpp"
#include "testing/plain_attention.hpp"
#include "testing/problem.hpp"

namespace folio::inline v0::verify {

/// The float64 oracle's answer to a batch, read from the very views that kernels get; for the whole of `problem`.
AttentionResult<double> oracle_attention(const Problem& problem, const BatchMemory& batch);

}  // namespace folio::inline v0::verify
