#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "folio/context.hpp"

namespace folio::replay {

/// What this machine can do at best, measured in this process on the context's threads: the limits that attention is
/// held against. Only figures taken in turn with what they are compared to mean anything; machines are shared and
/// clocks move.

/// Pages to read, in the order given (shuffle it, as a cache's pages are).
struct PageList {
  std::span<const std::byte* const> pages;
  size_t page_bytes = 0;  ///< a multiple of 256
};

/// Bytes a second of one plain read of all pages, every thread its share, `streams` (1, 4 or 8) pages in step.
double read_rate(const Context& context, const PageList& list, int32_t streams);

/// The best of 1, 4 and 8 streams, one round each.
double best_read_rate(const Context& context, const PageList& list);

/// Float32 multiply-adds with all operands in registers, every thread: floating-point operations a second, two a
/// multiply-add. Takes about `seconds`.
double multiply_rate(const Context& context, double seconds = 0.02);

/// The same for bfloat16 products in the tile registers of a matrix unit (AMX); 0 where there is none.
double matrix_rate(const Context& context, double seconds = 0.02);

/// The same for pairs of bfloat16 in AVX-512's registers; 0 without AVX512_BF16.
double pair_rate(const Context& context, double seconds = 0.02);

/// Of the unit that computes the products of a CPU kernel, by its name (AttentionOp::kernel_name): matrix_rate for AMX,
/// multiply_rate for kernels of float32 products, the larger of pair_rate and multiply_rate for avx512-bf16, which has
/// both, and 0 for one whose unit has no yardstick.
double product_rate(const Context& context, std::string_view kernel, double seconds = 0.02);

/// Which instruction set the first two run on: "x86-64-v4", "x86-64-v3" or "baseline".
std::string_view yardstick_isa();

}  // namespace folio::replay
