#pragma once

#include "kernels/cuda/common/combine/combine.hpp"

namespace folio::inline v0::kernels::cuda {

/// Merges of eight states or fewer, all of 16 bits or all of 32: one thread a row weighs its states, then all threads
/// take pieces of rows. Returns false, and does nothing, for others.
bool enqueue_few_states(const CombineParams& params, bool wide, Stream stream);

/// Whether every row of all sources and of the output begins where eight elements can be read or written at once.
bool is_wide(const CombineParams& params);

}  // namespace folio::inline v0::kernels::cuda
