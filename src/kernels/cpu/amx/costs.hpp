#pragma once

#include "kernels/cpu/common/costs.hpp"

/// What work tiles cost in AMX's tile registers, on the reference machine's scale: a Xeon's nanoseconds by 1.13, as
/// avx512/costs.hpp says. The page of the costs: docs/archive/2026-11-29-cpu-costs.md.
namespace folio::inline v0::kernels::amx {

/// Rows that the kernel leaves to avx512 cannot be measured here. Their figures only say that AMX takes longer:
/// - bfloat16, strided, 1 to 8 rows, and packed pages of 16, 1 and 4: by ratios to avx512 (decision 0073).
/// - float16, 1 to 16 rows, and strided 32: by ratios to avx512 (decision 0081).
/// - int8, 1 to 16 rows: as 32. Wide heads, 1 and 4: as 8.
/// Packed pages of 32 with 1 and 4 rows, and packed fp8 with them: from quiet runs (page of the costs).
/// Prefill over packed bfloat16 pages: 0.94 of strided ones' time, the median of seven rows with 16 threads
/// (docs/archive/2026-11-29-cpu-beside-vllm-on-amx.md).
/// From the rows on where a line stays below avx512's, work tiles are AMX's (`min_rows`).
inline constexpr cpu::CostLine kCosts[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {48.3, 48.3, 48.3, 45.8, 44, 66.2, 145}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {122, 122, 123, 73.8, 86, 95.1, 212}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 32, false, {35.9, 35.9, 36.6, 34.7, 50.3, 86.2, 199}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {76.4, 76.4, 54.5, 52.5, 69.6, 89.2, 199}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {121, 121, 113, 128, 155, 218, 493}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {144, 144, 103, 134, 136, 186, 430}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {105, 105, 105, 105, 105, 139, 279}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {60, 60, 60, 60, 60, 101, 245}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {28.3, 28.3, 27.9, 28.5, 49.2, 76.2, 185}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {28.3, 28.3, 29.1, 28.3, 47.9, 72.1, 183}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {67, 65.5, 68.4, 62.6, 84, 92.1, 206}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {68.6, 70.3, 68.4, 72.6, 84.1, 90.8, 204}},
};

}  // namespace folio::inline v0::kernels::amx
