#pragma once

/// src/ptx/global_load.cuh on the host.
namespace folio::inline v0::ptx {

inline void prefetch(const void*) {}

}  // namespace folio::inline v0::ptx
