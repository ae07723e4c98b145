#pragma once

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/attention/item_call.hpp"

namespace folio::inline v0::kernels::amx {

/// The AMX kernel with tiles in software, "amx-emulated": all of its logic, on any machine with AVX-512.
const AttentionKernel& emulated_kernel();

/// Its arithmetic.
extern const cpu::Arithmetic kEmulatedArithmetic;

}  // namespace folio::inline v0::kernels::amx
