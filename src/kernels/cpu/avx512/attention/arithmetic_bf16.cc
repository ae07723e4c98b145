#define FOLIO_ISA isa_avx512_bf16
#include "kernels/cpu/avx512/attention/accumulate.hpp"

#include "kernels/cpu/avx512/attention/arithmetic.hpp"
#include "kernels/cpu/common/attention/fold.hpp"
#include "kernels/cpu/common/attention/load_queries.hpp"

namespace folio::inline v0::kernels::avx512 {

const cpu::Arithmetic kBf16Arithmetic{cpu::FOLIO_ISA::load_queries, cpu::FOLIO_ISA::accumulate, cpu::FOLIO_ISA::fold};

}  // namespace folio::inline v0::kernels::avx512
