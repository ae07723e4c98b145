#pragma once

#include "kernels/cpu/common/config.hpp"

namespace folio::inline v0::kernels::amx {

/// For x86-64-v4 with AMX. Its functions are called between configure_tiles and release_tiles.
extern const cpu::Collective kCollective;

/// Loads the calling thread's tile configuration (LDTILECFG), and releases it (TILERELEASE).
void configure_tiles() noexcept;
void release_tiles() noexcept;

}  // namespace folio::inline v0::kernels::amx
