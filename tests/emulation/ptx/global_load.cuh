#pragma once

#include <cstdint>

/// src/ptx/global_load.cuh on the host.
namespace folio::inline v0::ptx {

inline void prefetch(const void*) {}
inline void read_constant(const uint32_t*) {}
inline void load_if(int32_t& to, const int32_t* from, bool wanted) {
  if (wanted) to = *from;
}

}  // namespace folio::inline v0::ptx
