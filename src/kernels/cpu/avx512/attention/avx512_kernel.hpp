#pragma once

#include "kernels/attention_kernel.hpp"

namespace folio::inline v0::kernels::avx512 {

/// The kernel "avx512": AVX-512 with VBMI, which servers have from Ice Lake and Zen 4 on.
const AttentionKernel& attention_kernel();

}  // namespace folio::inline v0::kernels::avx512
