#pragma once

#include <cstdint>

namespace folio::replay {

inline constexpr uint64_t kGoldenGamma =
    0x9e3779b97f4a7c15u;  // 2^64 / golden ratio, odd: the Weyl increment of splitmix64

/// The finaliser of splitmix64 (Steele, Lea, Flood: 'Fast splittable pseudorandom number generators', OOPSLA 2014):
/// every output bit depends on every input bit.
constexpr uint64_t mix(uint64_t x) noexcept {
  x += kGoldenGamma;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// An ordered combination: mix(a, b) != mix(b, a).
constexpr uint64_t mix(uint64_t a, uint64_t b) noexcept {
  return mix(mix(a) ^ b);
}

template <typename... More>
constexpr uint64_t mix(uint64_t a, uint64_t b, More... more) noexcept {
  return mix(mix(a, b), static_cast<uint64_t>(more)...);
}

}  // namespace folio::replay
