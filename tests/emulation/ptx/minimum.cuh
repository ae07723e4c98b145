#pragma once

/// src/ptx/minimum.cuh, emulated.
namespace folio::inline v0::ptx {

inline float least(float x, float y) {
  return x < y || x != x ? x : y;
}

}  // namespace folio::inline v0::ptx
