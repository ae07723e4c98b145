#pragma once

#include <string>

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/attention/item_call.hpp"

namespace folio::inline v0::kernels::amx {

/// "amx": bfloat16 products in AMX's tile registers, over packed pages. Answers for every configuration on any machine;
/// what it lacks, `unavailable` says.
const AttentionKernel& attention_kernel();

/// The kernel's description under another name and arithmetic: for the kernel itself, and for tests that run its logic
/// with tiles in software.
AttentionKernel describe(const char* name, std::string (*unavailable)(const platform::CpuFeatures&),
                         size_t (*scratch_bytes)(const AttentionConfig&, const scheduler::TileShape&),
                         void (*run_worker)(const AttentionParams&, int32_t) noexcept,
                         void (*run_merge)(const AttentionParams&, int32_t) noexcept);

}  // namespace folio::inline v0::kernels::amx
