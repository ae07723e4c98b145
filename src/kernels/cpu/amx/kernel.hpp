#pragma once

#include <string>

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/config.hpp"

namespace folio::inline v0::kernels::amx {

/// Work tiles of fewer rows are the AVX-512 kernel's; 0 = none are.
int32_t min_rows(const AttentionConfig& config);

/// AttentionKernel::run_worker with a collective of AMX's layout, and the AVX-512 kernel's for work tiles of few rows.
void run_worker_by_rows(const cpu::Collective& collective, const AttentionParams& params, int32_t worker) noexcept;

/// The kernel's description with a name and functions: for the kernel itself, and for tests, which run it with tiles in
/// software.
AttentionKernel describe(const char* name, std::string (*unavailable)(const platform::CpuFeatures&),
                         size_t (*scratch_bytes)(const AttentionConfig&, const scheduler::TileShape&),
                         void (*run_worker)(const AttentionParams&, int32_t) noexcept,
                         void (*run_combine)(const AttentionParams&, int32_t) noexcept);

}  // namespace folio::inline v0::kernels::amx
