#include "kernels/cpu/avx512/attention/avx512_kernel.hpp"

#include "kernels/cpu/avx512/attention/arithmetic.hpp"
#include "kernels/cpu/common/attention/kernel.hpp"

namespace folio::inline v0::kernels::avx512 {
namespace {

std::string needs_vbmi(const platform::CpuFeatures& features) {
  return features.x86_64_v4() && features.avx512vbmi ? ""
                                                     : "the CPU or the OS lacks AVX-512 (F, BW, CD, DQ, VL) with VBMI";
}

}  // namespace

const AttentionKernel& attention_kernel() {
  static const AttentionKernel kernel = cpu::attention_kernel<kArithmetic>("avx512", needs_vbmi);
  return kernel;
}

}  // namespace folio::inline v0::kernels::avx512
