#pragma once

#include <cstdint>

namespace folio::inline v0::verify {

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same numbers everywhere, unlike the standard distributions.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  /// Uniform in [0, n); n >= 1. (The bias of the modulo is below n / 2^64.)
  int32_t below(int32_t n) { return static_cast<int32_t>(next() % static_cast<uint64_t>(n)); }

  /// Uniform in [low, high].
  int32_t between(int32_t low, int32_t high) { return low + below(high - low + 1); }

  bool one_in(int32_t n) { return below(n) == 0; }

  /// Uniform in [0, 1).
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-24f; }

  /// Roughly normal, mean 0, variance 1, |x| < 3.5: the sum of four uniforms.
  float normal() { return (unit() + unit() + unit() + unit() - 2.0f) * 1.7320508f; }

  /// An independent stream.
  Random fork(uint64_t label) { return Random(next() ^ (label * 0xd1342543de82ef95u)); }

 private:
  uint64_t state_;
};

}  // namespace folio::inline v0::verify
