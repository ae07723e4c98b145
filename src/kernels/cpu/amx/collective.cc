#define FOLIO_ISA isa_amx
#include "kernels/cpu/amx/collective.hpp"

#include "kernels/cpu/amx/mainloop.hpp"
#include "kernels/cpu/common/softmax.hpp"
#include "simd/amx_tiles.hpp"

namespace folio::inline v0::kernels::amx {

const cpu::Collective kCollective{.load_q = cpu::FOLIO_ISA::load_q_amx,
                                  .mainloop = cpu::FOLIO_ISA::mainloop_amx<simd::AmxTiles>,
                                  .combine_states = cpu::FOLIO_ISA::combine_states,
                                  .scratch_bytes = cpu::FOLIO_ISA::scratch_bytes_amx,
                                  .store_row = cpu::FOLIO_ISA::store_row_amx,
                                  .min_rows_of_heads = 1,
                                  .max_rows_of_heads = cpu::FOLIO_ISA::kMaxDecodeRows,
                                  .takes_packed_heads = false,
                                  .row_padding = cpu::FOLIO_ISA::kRowBlock};

void configure_tiles() noexcept {
  simd::AmxTiles::configure();
}

void release_tiles() noexcept {
  simd::AmxTiles::release();
}

}  // namespace folio::inline v0::kernels::amx
