#define FOLIO_ISA isa_bf16_emulated
#include "kernels/cpu/common/vec.hpp"

#define FOLIO_VEC_BFMMLA

namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

FOLIO_INLINE float without_denormal(float value) {
  return __builtin_fabsf(value) < 0x1p-126f ? 0.0f : value;
}

FOLIO_INLINE float product(uint16_t a, uint16_t b) {
  const uint32_t words[2] = {static_cast<uint32_t>(a) << 16, static_cast<uint32_t>(b) << 16};
  float values[2];
  __builtin_memcpy(values, words, sizeof(values));
  return without_denormal(without_denormal(values[0]) * without_denormal(values[1]));
}

/// BFMMLA in software: its order and its zeros for denormals, but sums rounded to nearest.
FOLIO_INLINE Vec multiply_add_2x2(Bf16Vec a, Bf16Vec b, Vec c) {
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      for (int k = 0; k < 4; k += 2) {
        const float both = product(a[4 * i + k], b[4 * j + k]) + product(a[4 * i + k + 1], b[4 * j + k + 1]);
        c[2 * i + j] = without_denormal(c[2 * i + j] + without_denormal(both));
      }
    }
  }
  return c;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA

#include "kernels/cpu/generic/collective.hpp"
#include "kernels/cpu/generic/mainloop.hpp"

namespace folio::inline v0::kernels::generic {

extern const cpu::Collective kEmulatedBf16Collective;
const cpu::Collective kEmulatedBf16Collective{.load_q = cpu::FOLIO_ISA::load_rotated_q,
                                              .mainloop = cpu::FOLIO_ISA::mainloop,
                                              .combine_states = cpu::FOLIO_ISA::combine_states,
                                              .applies_rope = true,
                                              .decodes_ds_mla = true,
                                              .min_rows_of_heads = 1};

}  // namespace folio::inline v0::kernels::generic
