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

/// From 8 rows on measured as avx512's are (avx512/costs.hpp). 1 and 4 rows are avx512's by ratios of their times on a
/// Zen 4 (docs/kernels/avx512.md): bfloat16 strided 1.07 and 1.20, packed 1.05 and 1.12, e4m3 1.59 and 1.36. Lines of
/// other types take bfloat16's ratios.
inline constexpr cpu::CostLine kV4Costs[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {43.2, 39.9, 69.6, 103, 137, 278, 1160}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {39.4, 50.8, 56.7, 102, 177, 426, 1190}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {41, 50.1, 65, 94.5, 163, 286, 1130}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {31.2, 50.3, 58.1, 98.4, 164, 302, 1220}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {38.6, 54.5, 79.5, 124, 172, 284, 1120}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {44.6, 43.8, 94.5, 100, 160, 302, 1160}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {47, 46.2, 102, 118, 155, 283, 1140}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {44.6, 43.8, 59.8, 87, 163, 300, 1140}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {47, 46.2, 57.8, 83.2, 147, 271, 1090}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {27.4, 35.3, 73.2, 123, 167, 280, 1150}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {28.6, 34.9, 61.5, 89.7, 153, 283, 1130}},
    {DType::kFloat32, KvFormat::kStrided, 1, false, {75.6, 100, 86.7, 137, 200, 351, 1360}},
};
#elif defined(__aarch64__)
/// Of kBaselineCosts over bfloat16 caches, by instructions of the inner loops (docs/kernels/generic.md): 176
/// for a token of four rows, of 256. To be measured.
inline constexpr double kBf16Share = 0.69;
#endif

}  // namespace folio::inline v0::kernels::generic
