#define FOLIO_ISA isa_v4
#include "kernels/cpu/generic/attention/arithmetic.hpp"

#include "kernels/cpu/generic/attention/arithmetics.hpp"

namespace folio::inline v0::kernels::generic {

const cpu::Arithmetic kV4Arithmetic{.load_queries = cpu::FOLIO_ISA::load_turned_queries,
                                    .accumulate = cpu::FOLIO_ISA::accumulate,
                                    .fold = cpu::FOLIO_ISA::fold,
                                    .rotates = true};

}  // namespace folio::inline v0::kernels::generic
