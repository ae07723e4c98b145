#pragma once

#include <span>

#include "kernels/attention_kernel.hpp"

namespace folio::inline v0::kernels::avx512 {

/// The preferred first: "avx512-bf16", which multiplies bfloat16 queries with bfloat16 and fp8 keys in pairs and is
/// offered where that is faster; "avx512", for every CPU that has AVX-512 with VBMI (servers from Ice Lake and Zen 4
/// on).
std::span<const AttentionKernel* const> attention_kernels();

}  // namespace folio::inline v0::kernels::avx512
