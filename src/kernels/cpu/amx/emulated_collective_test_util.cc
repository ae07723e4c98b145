#define FOLIO_ISA isa_amx_emulated
#include "kernels/cpu/amx/emulated_kernel_test_util.hpp"
#include "kernels/cpu/amx/mainloop.hpp"
#include "kernels/cpu/common/softmax.hpp"
#include "simd/emulated_tiles_test_util.hpp"

namespace folio::inline v0::kernels::amx {

const cpu::Collective kEmulatedCollective{.load_q = cpu::FOLIO_ISA::load_q_amx,
                                          .mainloop = cpu::FOLIO_ISA::mainloop_amx<simd::EmulatedTiles>,
                                          .combine_states = cpu::FOLIO_ISA::combine_states,
                                          .scratch_bytes = cpu::FOLIO_ISA::scratch_bytes_amx,
                                          .store_row = cpu::FOLIO_ISA::store_row_amx,
                                          .min_rows_of_heads = 1,
                                          .max_rows_of_heads = cpu::FOLIO_ISA::kMaxDecodeRows,
                                          .takes_packed_heads = false,
                                          .row_padding = cpu::FOLIO_ISA::kRowBlock};

}  // namespace folio::inline v0::kernels::amx
