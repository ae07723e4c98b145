#pragma once

#include "kernels/cpu/common/costs.hpp"

/// What the AVX-512 kernels cost, on the reference machine's scale. It has no AVX-512, so all figures are converted
/// from ratios that were recorded on other machines. All are to be measured anew, by `folio_attention_bench --costs`.
/// The page of the costs: docs/archive/2026-11-29-cpu-costs.md.
namespace folio::inline v0::kernels::avx512 {

/// avx512 on Xeons (Ice Lake and later), from generic-v3's table.
/// - bfloat16, packed, 4 rows and prefill: 12.4 to 16.0 ms and 21 to 34 ms, one Xeon core (page of the costs).
/// - 4, 8, 16 rows, strided 13.0, 17.9, 32.8 ms, packed 13.7, 24.5, 33.8 ms: decision 0073. Between by logarithms.
/// - 1 row: 0.87 of 4 rows' time (docs/kernels/avx512.md, Zen 4).
/// - e4m3: 9.4 to bfloat16's 12.4 ms with 4 rows, the same Xeon core; equal with 8, 1.03 in prefill (Zen 4). e5m2: the
///   same code.
/// - int8: 17.4 to bfloat16's 25 ms with 4 rows (docs/kernels/avx512.md, Xeon); equal from 16 rows on: not recorded.
/// - float16, float32, wide heads: as generic-v3's to its bfloat16 lines; not recorded.
inline constexpr cpu::CostLine kCosts[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {40.5, 33.4, 47.6, 82, 167, 323, 1270}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {36.9, 42.5, 58.5, 107, 201, 377, 1330}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {38.9, 44.7, 80, 110, 203, 374, 1270}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {29.2, 42.1, 59, 96, 189, 340, 1360}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {36.6, 48.7, 94.9, 114, 205, 378, 1260}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {28, 32.2, 58.5, 107, 202, 382, 1360}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {29.5, 33.9, 80, 110, 205, 379, 1300}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {28, 32.2, 58.5, 107, 202, 382, 1360}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {29.5, 33.9, 80, 110, 205, 379, 1300}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {25.7, 29.6, 48.8, 107, 201, 377, 1330}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {27.1, 31.1, 66.8, 110, 203, 374, 1270}},
    {DType::kFloat32, KvFormat::kStrided, 1, false, {70.8, 84, 92.5, 114, 244, 387, 1440}},
};

/// avx512-bf16 where VDPBF16PS is slow, from kCosts.
/// - 4, 8 and 16 rows, strided 13.9, 25.0, 60.6 ms, packed 15.5, 47.2, 57.7 ms: decision 0073.
/// - Wide heads with 8, 16, 32 rows and in prefill 1.24, 1.12, 1.37, 1.27: docs/archive/2026-11-29-amx-mla.md.
///   More than 16 rows of other heads take those too. fp8 takes bfloat16's ratios.
inline constexpr cpu::CostLine kSlowBf16Costs[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {50.3, 41.4, 59.2, 91.8, 230, 433, 1620}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {39.5, 45.4, 81.7, 198, 275, 504, 1680}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {44, 50.6, 154, 188, 279, 500, 1610}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {29.9, 34.4, 81.7, 198, 277, 510, 1730}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {33.4, 38.4, 154, 188, 280, 507, 1660}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {29.9, 34.4, 81.7, 198, 277, 510, 1730}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {33.4, 38.4, 154, 188, 280, 507, 1660}},
};

/// avx512-bf16 on Zen 4 and 5, from kCosts, by ratios of Zen 4.
/// - Strided, with 1, 4, 8, 16 rows and in prefill: 0.96, 0.81, 0.80, 0.65, 0.61 of avx512's time, by the shares of
///   docs/kernels/avx512.md and what decision 0072 gained since. e4m3 with 1, 4, 8 and in prefill: 0.89, 0.67, 0.62,
///   0.64.
/// - Packed to strided: 14.6 to 18.5 ms with 1 row (decision 0071), 14.0 to 17.1 with 4, 19.4 to 19.6 with 8, 107
///   to 109 in prefill; e4m3 11.3 to 11.5 with 4 (decision 0072). e5m2: the same code.
inline constexpr cpu::CostLine kFastBf16Costs[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {38.9, 27.2, 38.2, 53.3, 107, 204, 782}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {35.5, 34.6, 46.9, 69.7, 129, 238, 814}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {28, 28.3, 46.4, 68.9, 127, 235, 799}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {24.8, 21.6, 36.3, 66.9, 127, 241, 870}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {19.6, 21.3, 35.7, 65.7, 125, 237, 854}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {24.8, 21.6, 36.3, 66.9, 127, 241, 870}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {19.6, 21.3, 35.7, 65.7, 125, 237, 854}},
};

}  // namespace folio::inline v0::kernels::avx512
