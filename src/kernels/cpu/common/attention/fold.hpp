#pragma once

#include "kernels/cpu/common/attention/math.hpp"

namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

static void fold(float* max, float* sum, float* acc, float other_max, float other_sum, const float* other_acc,
                 int32_t n) noexcept {
  if (other_max == -__builtin_inff()) return;
  if (*max == -__builtin_inff()) {
    *max = other_max;
    *sum = other_sum;
    __builtin_memcpy(acc, other_acc, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const float most = *max > other_max ? *max : other_max;
  const float mine = exp2_nonpositive(*max - most);
  const float others = exp2_nonpositive(other_max - most);
  for (int32_t d = 0; d < n; d += 4) {
    store(acc + d, load<Quad>(acc + d) * mine + load<Quad>(other_acc + d) * others);
  }
  *sum = *sum * mine + other_sum * others;
  *max = *sum != *sum ? *sum : most;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
