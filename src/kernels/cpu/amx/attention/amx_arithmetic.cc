#define FOLIO_ISA isa_amx
#include "kernels/cpu/amx/attention/amx_arithmetic.hpp"

#include "kernels/cpu/amx/attention/accumulate_tiles.hpp"
#include "kernels/cpu/common/attention/fold.hpp"
#include "simd/amx_tiles.hpp"

namespace folio::inline v0::kernels::amx {

const cpu::Arithmetic kArithmetic{cpu::FOLIO_ISA::load_queries_amx, cpu::FOLIO_ISA::accumulate_amx<simd::AmxTiles>,
                                  cpu::FOLIO_ISA::fold, cpu::FOLIO_ISA::own_bytes_amx,
                                  cpu::FOLIO_ISA::store_row_of_lanes};

void configure_tiles() noexcept {
  simd::AmxTiles::configure();
}
void release_tiles() noexcept {
  simd::AmxTiles::release();
}

}  // namespace folio::inline v0::kernels::amx
