#pragma once

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/attention/item_call.hpp"

namespace folio::inline v0::kernels::cpu {

/// AttentionKernel::run_worker and run_merge with the given arithmetic.
void run_worker(const Arithmetic& arithmetic, const AttentionParams& params, int32_t worker) noexcept;
void run_merge(const Arithmetic& arithmetic, const AttentionParams& params, int32_t merge) noexcept;

}  // namespace folio::inline v0::kernels::cpu
