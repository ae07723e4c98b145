#define FOLIO_ISA isa_neon_bf16
#include "kernels/cpu/generic/collective.hpp"
#include "kernels/cpu/generic/mainloop.hpp"

namespace folio::inline v0::kernels::generic {

const cpu::Collective kBf16Collective{.load_q = cpu::FOLIO_ISA::load_rotated_q,
                                      .mainloop = cpu::FOLIO_ISA::mainloop,
                                      .combine_states = cpu::FOLIO_ISA::combine_states,
                                      .applies_rope = true,
                                      .decodes_ds_mla = true,
                                      .min_rows_of_heads = 1};

}  // namespace folio::inline v0::kernels::generic
