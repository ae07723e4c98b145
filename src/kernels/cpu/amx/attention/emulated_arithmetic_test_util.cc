#define FOLIO_ISA isa_amx_emulated
#include "kernels/cpu/amx/attention/accumulate_tiles.hpp"
#include "kernels/cpu/amx/attention/emulated_kernel_test_util.hpp"
#include "kernels/cpu/common/attention/fold.hpp"
#include "simd/emulated_tiles_test_util.hpp"

namespace folio::inline v0::kernels::amx {

const cpu::Arithmetic kEmulatedArithmetic{cpu::FOLIO_ISA::load_queries_amx,
                                          cpu::FOLIO_ISA::accumulate_amx<simd::EmulatedTiles>, cpu::FOLIO_ISA::fold,
                                          cpu::FOLIO_ISA::own_bytes_amx, cpu::FOLIO_ISA::store_row_of_lanes};

}  // namespace folio::inline v0::kernels::amx
