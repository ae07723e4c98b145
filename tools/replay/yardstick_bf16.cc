// The rate of AVX-512's products of bfloat16 pairs with all operands in registers.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "replay/yardstick_kernels.hpp"

namespace folio::replay {

float multiply_pairs(int64_t iterations, double* flops) {
  constexpr size_t kAccumulators = 12;  // as of the float32 yardstick
  constexpr double kFlopsOfOne = 16 * 2 * 2.0;
  const __m512bh left = (__m512bh)_mm512_set1_epi32(0x3f803f80);   // pairs of 1
  const __m512bh right = (__m512bh)_mm512_set1_epi32(0x3a833a83);  // pairs of about 0.001
  __m512 accumulators[kAccumulators];
  for (size_t a = 0; a < kAccumulators; ++a) accumulators[a] = _mm512_set1_ps(static_cast<float>(a));
  for (int64_t i = 0; i < iterations; ++i) {
    for (size_t a = 0; a < kAccumulators; ++a) accumulators[a] = _mm512_dpbf16_ps(accumulators[a], left, right);
  }
  __m512 sum = accumulators[0];
  for (size_t a = 1; a < kAccumulators; ++a) sum = _mm512_add_ps(sum, accumulators[a]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, sum);
  *flops = kFlopsOfOne * kAccumulators * static_cast<double>(iterations);
  return lanes[0] + lanes[15];
}

}  // namespace folio::replay
