#define FOLIO_ISA isa_avx512
#include "kernels/cpu/avx512/collective.hpp"
#include "kernels/cpu/avx512/mainloop.hpp"

namespace folio::inline v0::kernels::avx512 {

const cpu::Collective kCollective{.load_q = cpu::FOLIO_ISA::load_q,
                                  .mainloop = cpu::FOLIO_ISA::mainloop,
                                  .combine_states = cpu::FOLIO_ISA::combine_states,
                                  .min_rows_of_heads = 2};

}  // namespace folio::inline v0::kernels::avx512
