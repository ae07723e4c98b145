#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "folio/types/attention.hpp"

namespace folio::inline v0::verify {

/// The rotary embedding of Feature::kRopeLlama, from its definition: components d and d + head_dim / 2 are the two
/// coordinates of a point that is turned by position / scale * theta^(-2 d / head_dim). Angles are float64 whatever
/// `Real` is, as a table of them would be. Remembers the angles of every position that it was asked for.
template <typename Real>
class Rotation {
 public:
  Rotation(const RopeArgs& rope, int32_t head_dim) : half_(static_cast<size_t>(head_dim / 2)) {
    for (size_t d = 0; d < half_; ++d) {
      const double exponent = -2.0 * static_cast<double>(d) / head_dim;
      speeds_.push_back(std::pow(static_cast<double>(rope.theta), exponent) / static_cast<double>(rope.scale));
    }
  }

  /// Turns a head's vector to where it stands at `position`.
  void rotate(int64_t position, std::span<Real> vector) {
    const std::vector<Real>& angles = at(position);
    for (size_t d = 0; d < half_; ++d) {
      const Real x = vector[d];
      const Real y = vector[d + half_];
      vector[d] = x * angles[2 * d] - y * angles[2 * d + 1];
      vector[d + half_] = y * angles[2 * d] + x * angles[2 * d + 1];
    }
  }

 private:
  /// Cosine and sine of every pair's angle.
  const std::vector<Real>& at(int64_t position) {
    std::vector<Real>& angles = known_[position];
    if (!angles.empty()) return angles;
    for (const double speed : speeds_) {
      const double angle = static_cast<double>(position) * speed;
      angles.push_back(static_cast<Real>(std::cos(angle)));
      angles.push_back(static_cast<Real>(std::sin(angle)));
    }
    return angles;
  }

  size_t half_;
  std::vector<double> speeds_;  ///< radians a position
  std::unordered_map<int64_t, std::vector<Real>> known_;
};

}  // namespace folio::inline v0::verify
