#include "kernels/cpu/common/kernel.hpp"
#include "kernels/cpu/avx2/collective.hpp"
#include "kernels/cpu/avx2/costs.hpp"

namespace folio::inline v0::kernels::avx2 {

const AttentionKernel& attention_kernel() {
  static const AttentionKernel kernel = cpu::attention_kernel<kCollective, kCosts>("avx2", cpu::needs_v3);
  return kernel;
}

}  // namespace folio::inline v0::kernels::avx2
