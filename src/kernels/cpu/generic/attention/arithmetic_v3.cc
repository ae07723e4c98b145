#define FOLIO_ISA isa_v3
#include "kernels/cpu/generic/attention/arithmetic.hpp"

#include "kernels/cpu/generic/attention/arithmetics.hpp"

namespace folio::inline v0::kernels::generic {

const Arithmetic kV3Arithmetic{FOLIO_ISA::load_queries, FOLIO_ISA::accumulate, FOLIO_ISA::fold};

}  // namespace folio::inline v0::kernels::generic
