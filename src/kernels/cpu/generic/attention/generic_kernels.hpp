#pragma once

#include <span>

#include "kernels/attention_kernel.hpp"

namespace folio::inline v0::kernels::generic {

/// The portable kernel, once per instruction set it was compiled for, the widest first: "generic-v4", "generic-v3" (x86
/// only), "generic".
std::span<const AttentionKernel* const> attention_kernels();

}  // namespace folio::inline v0::kernels::generic
