#pragma once

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/attention/item_call.hpp"

namespace folio::inline v0::kernels::cpu {

/// What an arithmetic's items need beyond the common scratch memory.
size_t own_bytes(const Arithmetic& arithmetic, const AttentionConfig& config, const scheduler::TileShape& tile);

/// AttentionKernel::run_worker and run_merge with the given arithmetic.
void run_worker(const Arithmetic& arithmetic, const AttentionParams& params, int32_t worker) noexcept;
void run_merge(const Arithmetic& arithmetic, const AttentionParams& params, int32_t merge) noexcept;

}  // namespace folio::inline v0::kernels::cpu
