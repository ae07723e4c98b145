#pragma once

// Values that follow from what they belong to, so that nobody has to keep them, and how near a float32 result must be.
#include <cmath>
#include <cstdint>

/// A value in [-1, 1).
inline float value_of(uint32_t token, uint32_t position, uint32_t place) {
  uint64_t x = (uint64_t{token} << 40) ^ (uint64_t{position} << 20) ^ place;
  x = (x ^ (x >> 31)) * 0x7fb5d329728ea185u;
  x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44du;
  return static_cast<float>(static_cast<int32_t>((x >> 33) & 0xffff) - 0x8000) / 32768.0f;
}

/// Float32 sums of some hundred terms of everyday size err by less.
inline bool near(double got, double expected) {
  if (std::isinf(expected)) return got == expected;
  return std::abs(got - expected) <= 2e-5 + 2e-5 * std::abs(expected);
}
