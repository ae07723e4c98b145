#pragma once

#include "kernels/cpu/common/attention/vec.hpp"

/// Tiles with infinite or NaN values among those that some row does not see.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// True if a converted value of the tile is infinite or NaN.
static inline bool has_special_values(const ItemCall& call) {
  const IntVec exponent = splat_int(0x7f800000);
  IntVec special{};
  const int32_t count = kTileTokens * call.v_stride;
  for (int32_t i = 0; i < count; i += kLanes) {
    special |= (bits(load<Vec>(call.scratch.v + i)) & exponent) == exponent;
  }
  for (int i = 0; i < kLanes; ++i) {
    if (special[i] != 0) return true;
  }
  return false;
}

/// The sums of values token by token, leaving out those that the row does not see: for tiles with infinite or NaN
/// values, of which 0 times would be NaN.
static inline void value_row_careful(const ItemCall& call, uint64_t visible, int32_t r) {
  const float* const weights = call.scratch.p + r * kTileTokens;
  float* const acc = call.states.acc + r * call.v_stride;
  const Vec rescale = splat(call.scratch.rescale[r]);
  for (int32_t d = 0; d < call.v_stride; d += kLanes) {
    Vec sum = load<Vec>(acc + d) * rescale;
    for (uint64_t left = visible; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      sum = multiply_add(splat(weights[t]), load<Vec>(call.scratch.v + t * call.v_stride + d), sum);
    }
    store(acc + d, sum);
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
