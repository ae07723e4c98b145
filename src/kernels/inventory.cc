#include <algorithm>
#include <array>
#include <iterator>
#include <vector>

#include "kernels/attention_kernel.hpp"
#if defined(__x86_64__)
#include "kernels/cpu/amx/attention/amx_kernel.hpp"
#endif
#include "kernels/cpu/generic/attention/generic_kernels.hpp"

namespace folio::inline v0::kernels {
namespace {

std::vector<const AttentionKernel*> every_kernel() {
  std::vector<const AttentionKernel*> kernels;
#if defined(__x86_64__)
  kernels.push_back(&amx::attention_kernel());
#endif
  std::ranges::copy(generic::attention_kernels(), std::back_inserter(kernels));
  return kernels;
}

}  // namespace

std::span<const AttentionKernel* const> cpu_attention_kernels() {
  static const std::vector<const AttentionKernel*> kernels = every_kernel();
  return kernels;
}

}  // namespace folio::inline v0::kernels
