#pragma once

#include "kernels/cpu/common/costs.hpp"

/// What work tiles cost in AMX's tile registers, on the reference machine's scale. It has no AMX, so all figures are
/// converted from ratios to avx512's time on Xeons with AMX (avx512/costs.hpp). All are to be measured anew, by
/// `folio_attention_bench --costs --kernel amx`. Strided fp8 caches were never measured and have no line.
/// The page of the costs: docs/archive/2026-11-29-cpu-costs.md.
namespace folio::inline v0::kernels::amx {

/// - bfloat16 with 4, 8, 16 rows and in prefill: strided 2.86, 2.27, 0.72, 0.50, packed pages of 16 1.71, 0.68, 0.46,
///   0.18 (decision 0073). 1 row as 4: bound by V's interleaving.
/// - Packed pages of 32: 9.7 to 12.1 ms with 4 rows, one Xeon core (page of the costs); 1 to 16 rows take as long
///   (docs/archive/2026-11-21-amx.md). Prefill as in pages of 16.
/// - Wide heads: 0.78, 0.34, 0.26, 0.24, 0.19 with 8, 16, 32, 128 rows and in prefill
///   (docs/archive/2026-11-29-amx-mla.md). Fewer than 8 rows as 8.
/// - float16: 1.24, 0.93, 0.81, 0.53 with 16, 32, 64 rows and in prefill; 8 rows as long as 16 (the same page).
///   Packed: the same ratios.
/// - fp8, packed: 7.85 to avx512's 9.4 ms with 4 rows, pages of 32 (of 16: 1.08 times that); 1 to 16 rows take as long.
///   Prefill 16.0 to bfloat16's 14.0 ms. One Xeon core (page of the costs).
/// - int8: float16's ratios, an upper bound by argument (decision 0084); not measured.
/// From the rows on where a line stays below avx512's, work tiles are AMX's (`min_rows`); decisions 0073 and 0081 say
/// where that was measured.
inline constexpr cpu::CostLine kCosts[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {37.2, 37.2, 37.2, 27.9, 44.2, 77.9, 237}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {122, 122, 133, 77.4, 132, 226, 661}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 32, false, {35.9, 35.9, 35.9, 35.9, 56.9, 90.2, 227}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {76.4, 76.4, 54.2, 50.3, 73.3, 107, 227}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {121, 121, 121, 119, 175, 275, 714}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {144, 144, 144, 141, 190, 305, 661}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {133, 133, 133, 133, 187, 305, 705}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {136, 136, 136, 136, 189, 303, 673}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {28.3, 28.3, 28.3, 28.3, 49.3, 85.7, 259}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {28.3, 28.3, 28.3, 28.3, 49.3, 85.7, 259}},
};

}  // namespace folio::inline v0::kernels::amx
