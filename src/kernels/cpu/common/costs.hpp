#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "folio/types/attention.hpp"

/// What CPU kernels are ranked by: measured costs, which lie beside each kernel as data (cpu/<kernel>/costs.hpp).
namespace folio::inline v0::kernels::cpu {

/// Query rows of a KV head that costs are measured for.
inline constexpr std::array<int32_t, 7> kCostRows{1, 4, 8, 16, 32, 64, 256};

/// What a key of a KV head costs a kernel over caches of one kind, for each of kCostRows: nanoseconds of one core, head
/// dims of 128, caches in memory. `folio_attention_bench --costs` prints such lines. The reference is one core of an
/// EPYC (Zen 3). A table of a kernel that it lacks says how its figures were converted. What lines are compared by is
/// their ratio, so a machine that is slower throughout ranks its kernels alike.
struct CostLine {
  DType kv;
  KvFormat format;
  int32_t page_tokens;  ///< the line holds for pages of multiples of this
  bool wide_heads;      ///< it holds for head_dim_qk + head_dim_v above 512 alone, as MLA has them
  std::array<double, kCostRows.size()> nanoseconds;
};

/// Nanoseconds of a key and KV head for `rows` query rows (1 or more), of the first line that holds for the paged cache
/// of `config`: interpolated between logarithms, beyond the last of kCostRows in proportion to rows, and to head dims.
/// Infinity where no line holds, because the kernel was never measured there.
double cost(std::span<const CostLine> lines, const AttentionConfig& config, double rows);

/// From how many of kCostRows on `many` costs no more than `few`; 0: always, or one of them was never measured.
int32_t least_rows(std::span<const CostLine> few, std::span<const CostLine> many, const AttentionConfig& config);

}  // namespace folio::inline v0::kernels::cpu
