
#include <array>
#include <cmath>
#include <span>

#include "kernels/cpu/avx512/collective.hpp"
#include "kernels/cpu/avx512/costs.hpp"
#include "kernels/cpu/common/kernel.hpp"

namespace folio::inline v0::kernels::avx512 {
namespace {

std::string needs_vbmi(const platform::CpuFeatures& features) {
  return features.x86_64_v4() && features.avx512vbmi ? ""
                                                     : "the CPU or the OS lacks AVX-512 (F, BW, CD, DQ, VL) with VBMI";
}

std::string needs_bf16(const platform::CpuFeatures& features) {
  std::string why = needs_vbmi(features);
  if (why.empty() && !features.avx512_bf16) why = "the CPU or the OS lacks AVX512_BF16";
  return why;
}

/// Cores with AVX512-FP16 (Golden Cove and its successors) issue a dot product of bfloat16 pairs every second to third
/// cycle, slower than the two float32 multiply-adds that it replaces; Zen 4 and 5 issue it like one of them.
double bf16_cost(const platform::CpuFeatures& features, const AttentionConfig& config, double rows) {
  const std::span<const cpu::CostLine> lines = features.avx512_fp16 ? std::span(kSlowBf16Costs) : kFastBf16Costs;
  const double of_pairs = cpu::cost(lines, config, rows);
  return std::isfinite(of_pairs) ? of_pairs : cpu::cost(kCosts, config, rows);  // others have the GEMMs of avx512
}

bool is_bf16_or_fp8(DType dtype) {
  return dtype == DType::kBFloat16 || is_fp8(dtype);
}

/// GEMM1 of bfloat16 and fp8 data goes by VDPBF16PS too.
DType p_dtype_of_bf16(const AttentionConfig& config) {
  const bool rounds = is_bf16_or_fp8(config.q) && (is_bf16_or_fp8(config.kv) || is_bf16_or_fp8(config.ragged_kv));
  return rounds ? DType::kBFloat16 : DType::kFloat32;
}

}  // namespace

std::span<const AttentionKernel* const> attention_kernels() {
  static const AttentionKernel bf16 = [] {
    AttentionKernel kernel = cpu::attention_kernel<kBf16Collective, kFastBf16Costs>("avx512-bf16", needs_bf16);
    kernel.cost = bf16_cost;
    kernel.p_dtype = p_dtype_of_bf16;
    return kernel;
  }();
  static const AttentionKernel plain = cpu::attention_kernel<kCollective, kCosts>("avx512", needs_vbmi);
  static const std::array<const AttentionKernel*, 2> all{&plain, &bf16};
  return all;
}

}  // namespace folio::inline v0::kernels::avx512
