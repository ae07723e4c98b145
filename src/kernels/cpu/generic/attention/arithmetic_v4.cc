#define FOLIO_ISA isa_v4
#include "kernels/cpu/generic/attention/arithmetic.hpp"

#include "kernels/cpu/generic/attention/arithmetics.hpp"

namespace folio::inline v0::kernels::generic {

const cpu::Arithmetic kV4Arithmetic{cpu::FOLIO_ISA::load_queries, cpu::FOLIO_ISA::accumulate, cpu::FOLIO_ISA::fold};

}  // namespace folio::inline v0::kernels::generic
