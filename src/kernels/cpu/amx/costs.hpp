#pragma once

#include "kernels/cpu/common/costs.hpp"

/// What work tiles cost in AMX's tile registers, on the reference machine's scale: a Xeon's nanoseconds by 1.13, as
/// avx512/costs.hpp says. The page of the costs: docs/archive/2026-11-29-cpu-costs.md.
namespace folio::inline v0::kernels::amx {

/// - Up to 16 rows of bfloat16 (strided, packed pages of 16) and of fp8: ratios to avx512 in a run with 16 threads,
///   2026-11-30 (decision 0102). All threads together wait for memory in another way than one does.
/// - Else up to 32 rows: two virtual cores of such a Xeon on that day, all rows in tiles, the least of 4 to 10 runs.
/// - Prefill over packed bfloat16 pages: 0.94 of strided ones' time, the median of seven rows with 16 threads
///   (docs/archive/2026-11-29-cpu-beside-vllm-on-amx.md).
/// From the rows on where a line stays below avx512's, work tiles are AMX's (`min_rows`).
inline constexpr cpu::CostLine kCosts[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {35.4, 33.5, 33.7, 31, 39.3, 66.2, 145}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {48.9, 46.3, 45.2, 45.2, 47.1, 95.1, 212}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 32, false, {29.4, 28.7, 28.8, 34.7, 50.3, 86.2, 199}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {39.1, 46.9, 46.8, 46.8, 50.3, 89.2, 199}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {96, 96, 97, 97, 132, 218, 493}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {93.5, 93.5, 98.8, 109, 136, 186, 430}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {41, 41, 41.4, 41.8, 56.6, 139, 279}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {40.5, 40.5, 46.3, 47.9, 60, 101, 245}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {28.6, 27.8, 32.7, 32.7, 49.2, 76.2, 185}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {28.6, 27.8, 32.7, 32.7, 47.9, 72.1, 183}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {28.5, 38, 43.3, 43.3, 46.1, 92.1, 206}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {28.5, 38, 43.3, 43.3, 46.1, 90.8, 204}},
};

}  // namespace folio::inline v0::kernels::amx
