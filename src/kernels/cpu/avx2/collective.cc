#define FOLIO_ISA isa_avx2
#include "kernels/cpu/avx2/collective.hpp"
#include "kernels/cpu/avx2/mainloop.hpp"

namespace folio::inline v0::kernels::avx2 {

const cpu::Collective kCollective{.load_q = cpu::FOLIO_ISA::load_q,
                                  .mainloop = cpu::FOLIO_ISA::mainloop,
                                  .combine_states = cpu::FOLIO_ISA::combine_states,
                                  .min_rows_of_heads = 1};

}  // namespace folio::inline v0::kernels::avx2
