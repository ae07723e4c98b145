#pragma once

#include "kernels/cpu/common/costs.hpp"

/// What the AVX-512 kernels cost, on the reference machine's scale, which has no AVX-512.
/// From 8 rows on measured: `folio_attention_bench --costs`, 2026-11-29, on a Xeon with AMX, the least of four runs,
/// divided by 1.13: what avx2 and generic-v3 take there of their time on the reference machine, in the median.
/// 13 caches were measured at once, so that 1 and 4 rows, which memory bounds, said little. Those are ratios of quieter
/// runs on other machines.
/// The page of the costs: docs/archive/2026-11-29-cpu-costs.md.
namespace folio::inline v0::kernels::avx512 {

/// avx512. 1 and 4 rows from generic-v3's table:
/// - bfloat16, packed, 4 rows: 12.4 to 16.0 ms, one Xeon core (page of the costs). Strided to packed 13.0 to 13.7 ms
///   (decision 0073). 1 row: 0.87 of 4 rows' time (docs/kernels/avx512.md, Zen 4).
/// - e4m3: 9.4 to bfloat16's 12.4 ms, the same Xeon core; packed to strided 7.5 to 8.5 ms with 4 rows (16 threads,
///   decision 0102). Packed, 1 row: not below avx512-bf16 on Zen 4. e5m2: the same code.
/// - int8: 17.4 to bfloat16's 25 ms (docs/kernels/avx512.md, Xeon).
/// - float16, float32, wide heads: as generic-v3's to its bfloat16 lines; not recorded.
inline constexpr cpu::CostLine kCosts[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {40.5, 33.4, 52.5, 106, 142, 292, 1140}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {36.9, 42.5, 54, 113, 177, 347, 1190}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {38.9, 44.7, 61.2, 97.1, 170, 282, 1120}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {29.2, 42.1, 55.3, 103, 168, 295, 1160}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {36.6, 48.7, 67.6, 108, 169, 288, 1100}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {28, 32.2, 60.5, 99.9, 163, 295, 1170}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {20, 29, 58.1, 93.5, 147, 269, 1080}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {28, 32.2, 59.5, 99.9, 173, 307, 1110}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {20, 29, 54.6, 83.7, 143, 298, 1090}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {25.7, 29.6, 68.1, 110, 165, 286, 1110}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {27.1, 31.1, 55.5, 93, 151, 325, 1140}},
    {DType::kFloat32, KvFormat::kStrided, 1, false, {70.8, 84, 86.1, 143, 209, 326, 1300}},
};

/// avx512-bf16 where VDPBF16PS is slow, as on that Xeon. 1 and 4 rows from kCosts: 13.9 to 13.0 ms strided, 15.5
/// to 13.7 packed (decision 0073); wide heads with 8 rows 1.24 (docs/archive/2026-11-29-amx-mla.md). fp8:
/// bfloat16's ratios.
inline constexpr cpu::CostLine kSlowBf16Costs[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {50.3, 41.4, 66.9, 120, 203, 433, 1600}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {39.5, 45.4, 69.1, 133, 246, 585, 1800}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {44, 50.6, 85.8, 129, 232, 441, 1750}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {29.9, 34.4, 72.7, 138, 243, 471, 1750}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {33.4, 38.4, 88, 147, 223, 428, 1720}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {29.9, 34.4, 71.7, 140, 249, 481, 1750}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {33.4, 38.4, 74.7, 122, 222, 426, 1750}},
};

/// avx512-bf16 on Zen 4 and 5, from kCosts, by ratios of Zen 4.
/// - Strided, with 1, 4, 8, 16 rows and in prefill: 0.96, 0.81, 0.80, 0.65, 0.61 of avx512's time, by the shares of
///   docs/kernels/avx512.md and what decision 0072 gained since. e4m3 with 1, 4, 8 and in prefill: 0.89, 0.67, 0.62,
///   0.64.
/// - Packed to strided: 14.6 to 18.5 ms with 1 row (decision 0071), 14.0 to 17.1 with 4, 19.4 to 19.6 with 8, 107
///   to 109 in prefill; e4m3 11.3 to 11.5 with 4 (decision 0072). e5m2: the same code.
inline constexpr cpu::CostLine kFastBf16Costs[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {38.9, 27.2, 42.1, 69.1, 91.2, 184, 700}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {35.5, 34.6, 43.3, 73.5, 114, 219, 729}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {28, 28.3, 42.8, 72.7, 112, 216, 716}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {24.8, 21.6, 37.6, 62.4, 102, 186, 749}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {19.6, 21.3, 36.9, 61.3, 101, 183, 735}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {24.8, 21.6, 36.9, 62.4, 109, 194, 711}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {19.6, 21.3, 36.3, 61.3, 107, 190, 698}},
};

}  // namespace folio::inline v0::kernels::avx512
