#pragma once

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/config.hpp"

namespace folio::inline v0::kernels::amx {

/// The AMX kernel on any machine with AVX-512. "amx-all-rows" has all work tiles in tile registers: in software where
/// there is no AMX, which takes ten times as long. "amx-emulated-and-avx512" leaves those of few rows to the AVX-512
/// kernel, as "amx" does, and is for machines without that.
const AttentionKernel& emulated_kernel();
const AttentionKernel& emulated_kernel_with_few_rows();

/// Its collective.
extern const cpu::Collective kEmulatedCollective;

}  // namespace folio::inline v0::kernels::amx
