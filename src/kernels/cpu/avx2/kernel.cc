#include "kernels/cpu/common/kernel.hpp"
#include "kernels/cpu/avx2/collective.hpp"

namespace folio::inline v0::kernels::avx2 {
namespace {

std::string needs_v3(const platform::CpuFeatures& features) {
  return features.x86_64_v3() ? "" : "the CPU or the OS lacks x86-64-v3 (AVX2, FMA, F16C, BMI2)";
}

}  // namespace

const AttentionKernel& attention_kernel() {
  static const AttentionKernel kernel = cpu::attention_kernel<kCollective>("avx2", needs_v3, KvFormat::kCpuPacked);
  return kernel;
}

}  // namespace folio::inline v0::kernels::avx2
