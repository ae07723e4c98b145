#define FOLIO_ISA isa_avx512
#include "kernels/cpu/avx512/attention/arithmetic.hpp"

#include "kernels/cpu/avx512/attention/accumulate.hpp"
#include "kernels/cpu/common/attention/fold.hpp"
#include "kernels/cpu/common/attention/load_queries.hpp"

namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

static void accumulate(const ItemCall& call) noexcept {
  switch (call.keys.dtype) {
    case DType::kFloat32: accumulate_as<DType::kFloat32>(call); break;
    case DType::kFloat16: accumulate_as<DType::kFloat16>(call); break;
    case DType::kBFloat16: accumulate_as<DType::kBFloat16>(call); break;
    case DType::kFloat8E4M3: accumulate_as<DType::kFloat8E4M3>(call); break;
    case DType::kFloat8E5M2: accumulate_as<DType::kFloat8E5M2>(call); break;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA

namespace folio::inline v0::kernels::avx512 {

const cpu::Arithmetic kArithmetic{cpu::FOLIO_ISA::load_queries, cpu::FOLIO_ISA::accumulate, cpu::FOLIO_ISA::fold};

}  // namespace folio::inline v0::kernels::avx512
