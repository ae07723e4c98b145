#pragma once

#include <string>

#include "kernels/attention_kernel.hpp"

namespace folio::inline v0::kernels::amx {

/// The kernel's description with a name and functions: for the kernel itself, and for tests, which run it with tiles in
/// software.
AttentionKernel describe(const char* name, std::string (*unavailable)(const platform::CpuFeatures&),
                         size_t (*scratch_bytes)(const AttentionConfig&, const scheduler::TileShape&),
                         void (*run_worker)(const AttentionParams&, int32_t) noexcept,
                         void (*run_combine)(const AttentionParams&, int32_t) noexcept);

}  // namespace folio::inline v0::kernels::amx
