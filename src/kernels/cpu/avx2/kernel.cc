#include "kernels/cpu/common/kernel.hpp"
#include "kernels/cpu/avx2/collective.hpp"

namespace folio::inline v0::kernels::avx2 {

const AttentionKernel& attention_kernel() {
  static const AttentionKernel kernel = cpu::attention_kernel<kCollective>("avx2", cpu::needs_v3, KvFormat::kCpuPacked);
  return kernel;
}

}  // namespace folio::inline v0::kernels::avx2
