#include <vector>

#include "kernels/attention_kernel.hpp"

namespace folio::inline v0::kernels {
namespace {

std::vector<const AttentionKernel*> every_kernel() {
  std::vector<const AttentionKernel*> kernels;
  const auto append = [&kernels](const auto& more) { kernels.insert(kernels.end(), more.begin(), more.end()); };
#if defined(__x86_64__)
  kernels.push_back(&amx::attention_kernel());
  append(avx512::attention_kernels());
  kernels.push_back(&avx2::attention_kernel());
#endif
  append(generic::attention_kernels());
  return kernels;
}

}  // namespace

std::span<const AttentionKernel* const> cpu_attention_kernels() {
  static const std::vector<const AttentionKernel*> kernels = every_kernel();
  return kernels;
}

}  // namespace folio::inline v0::kernels
