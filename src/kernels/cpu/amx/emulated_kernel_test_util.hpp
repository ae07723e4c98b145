#pragma once

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/config.hpp"

namespace folio::inline v0::kernels::amx {

/// The AMX kernel with tiles in software, "amx-emulated": all of its logic, on any machine with AVX-512.
const AttentionKernel& emulated_kernel();

/// Its collective.
extern const cpu::Collective kEmulatedCollective;

}  // namespace folio::inline v0::kernels::amx
