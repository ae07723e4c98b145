#pragma once

#include "kernels/cpu/common/costs.hpp"

/// What the portable kernel's compiles cost on the reference machine.
namespace folio::inline v0::kernels::generic {

/// Of baseline x86-64. AArch64's takes the same figures, which are compared there with each other alone: no Arm machine
/// was measured.
/// Measured: `folio_attention_bench --costs --rounds 5`, 2026-11-29, on one of two virtual cores of an EPYC (Zen 3, 512
/// KB of L2) that other programs shared. One run.
inline constexpr cpu::CostLine kBaselineCosts[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {76.1, 139, 262, 357, 648, 1300, 5240}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {91.6, 165, 293, 432, 821, 1520, 5460}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 32, false, {70.4, 137, 241, 375, 683, 1330, 5280}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {68.8, 137, 242, 366, 676, 1310, 5780}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {185, 276, 543, 478, 800, 1420, 5680}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {219, 300, 574, 489, 802, 1420, 5710}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {346, 449, 881, 658, 970, 1600, 6370}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {312, 401, 782, 592, 900, 1540, 6480}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {255, 354, 739, 542, 863, 1510, 6680}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {229, 312, 607, 508, 825, 1700, 6290}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {146, 316, 446, 494, 797, 1550, 5930}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {116, 189, 351, 439, 742, 1380, 5530}},
    {DType::kFloat32, KvFormat::kStrided, 1, false, {95.2, 142, 248, 407, 810, 1390, 5640}},
};

#if defined(__x86_64__)
/// Measured: `folio_attention_bench --costs --rounds 5`, 2026-11-29, on one of two virtual cores of an EPYC (Zen 3, 512
/// KB of L2) that other programs shared. The least of two runs.
inline constexpr cpu::CostLine kV3Costs[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {59.2, 47.9, 79.4, 144, 253, 513, 2060}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {54, 61, 97.4, 188, 304, 598, 2150}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 32, false, {46.6, 58.1, 90.9, 148, 264, 506, 1980}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {42.6, 57.7, 87.9, 146, 266, 516, 2060}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {42.7, 60.5, 98.3, 168, 286, 539, 2200}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {40.1, 62.8, 104, 150, 268, 520, 2030}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {58.7, 88.4, 157, 174, 293, 533, 2120}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {54.6, 80.3, 147, 164, 279, 515, 2120}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {42.5, 59.5, 99.3, 152, 274, 520, 2190}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {31.3, 55.5, 96.5, 146, 269, 501, 2040}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {36.2, 57.5, 88.7, 166, 299, 564, 2230}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {35.9, 57.6, 92, 148, 270, 535, 2100}},
    {DType::kFloat32, KvFormat::kStrided, 1, false, {104, 121, 154, 200, 369, 614, 2340}},
};

/// Converted from avx512's table by ratios of their times on a Zen 4 (docs/kernels/avx512.md). bfloat16, 1, 4 and 8
/// rows and prefill: 1.07, 1.20, 1.04 over strided pages, 1.05, 1.12, 1.06 and 1.01 over packed ones.
/// e4m3: 1.59, 1.36, 1.35, 1.03. Strided with 16 rows and in prefill it was 0.92 and 0.95, before avx512 walked KV
/// heads together: taken as 1. Lines of other types take bfloat16's ratios. To be measured anew.
inline constexpr cpu::CostLine kV4Costs[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {43.2, 39.9, 49.6, 82, 167, 323, 1270}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {39.4, 50.8, 60.9, 107, 201, 377, 1330}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {41, 50.1, 85.1, 116, 212, 387, 1290}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {31.2, 50.3, 61.4, 96, 189, 340, 1360}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {38.6, 54.5, 101, 120, 214, 390, 1270}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {44.6, 43.8, 78.9, 137, 245, 438, 1400}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {47, 46.2, 108, 141, 248, 435, 1340}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {44.6, 43.8, 78.9, 137, 245, 438, 1400}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {47, 46.2, 108, 141, 248, 435, 1340}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {27.4, 35.3, 50.8, 107, 201, 377, 1330}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {28.6, 34.9, 71, 116, 212, 387, 1290}},
    {DType::kFloat32, KvFormat::kStrided, 1, false, {75.6, 100, 96.2, 114, 244, 387, 1440}},
};
#elif defined(__aarch64__)
/// Of kBaselineCosts over bfloat16 caches, by instructions of the inner loops (docs/kernels/generic.md): 176
/// for a token of four rows, of 256. To be measured.
inline constexpr double kBf16Share = 0.69;
#endif

}  // namespace folio::inline v0::kernels::generic
