#include <vector>

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/generic/attention/generic_kernels.hpp"
#if defined(__x86_64__)
#include "kernels/cpu/amx/attention/amx_kernel.hpp"
#include "kernels/cpu/avx512/attention/avx512_kernels.hpp"
#endif

namespace folio::inline v0::kernels {

std::span<const AttentionKernel* const> cpu_attention_kernels() {
  static const std::vector<const AttentionKernel*> all = [] {
    std::vector<const AttentionKernel*> kernels;
#if defined(__x86_64__)
    kernels.push_back(&amx::attention_kernel());
    const auto avx512 = avx512::attention_kernels();
    kernels.insert(kernels.end(), avx512.begin(), avx512.end());
#endif
    const auto generic = generic::attention_kernels();
    kernels.insert(kernels.end(), generic.begin(), generic.end());
    return kernels;
  }();
  return all;
}

}  // namespace folio::inline v0::kernels
