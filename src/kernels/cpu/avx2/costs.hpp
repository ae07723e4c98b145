#pragma once

#include "kernels/cpu/common/costs.hpp"

/// What the AVX2 kernel costs on the reference machine.
namespace folio::inline v0::kernels::avx2 {

/// Measured: `folio_attention_bench --costs --rounds 5`, 2026-11-29, on one of two virtual cores of an EPYC (Zen 3, 512
/// KB of L2) that other programs shared. The least of two runs.
inline constexpr cpu::CostLine kCosts[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {45.2, 47, 79, 137, 239, 478, 1910}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {44.1, 53.8, 88.3, 160, 286, 516, 2030}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 32, false, {28.9, 42.9, 72.4, 142, 250, 472, 1880}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {28.5, 41.3, 74.2, 144, 251, 500, 1890}},
    {DType::kFloat16, KvFormat::kStrided, 1, false, {44.4, 53, 88.3, 159, 274, 524, 1960}},
    {DType::kFloat16, KvFormat::kCpuPacked, 1, false, {33.3, 50.6, 90, 143, 257, 477, 1930}},
    {DType::kFloat8E4M3, KvFormat::kStrided, 1, false, {44.7, 74.7, 101, 160, 274, 501, 2000}},
    {DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false, {39.2, 65.8, 93.7, 147, 255, 477, 1890}},
    {DType::kFloat8E5M2, KvFormat::kStrided, 1, false, {38.8, 56.4, 82.2, 140, 254, 512, 2040}},
    {DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false, {29.3, 53.7, 80.6, 139, 248, 475, 1940}},
    {DType::kInt8, KvFormat::kStrided, 1, false, {42.1, 60.4, 88.5, 157, 280, 518, 2090}},
    {DType::kInt8, KvFormat::kCpuPacked, 1, false, {32.9, 58.5, 84.4, 143, 260, 506, 1990}},
    {DType::kFloat32, KvFormat::kStrided, 1, false, {82.6, 91.9, 129, 205, 329, 579, 2200}},
};

}  // namespace folio::inline v0::kernels::avx2
