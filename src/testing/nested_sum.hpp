#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace folio::inline v0::verify {

/// The sum of many vectors, component by component, which does not drift with their number. A partial sum takes kTerms
/// vectors in order; then it goes whole into the next level's partial sum, and so on.
template <typename Real>
class NestedSum {
 public:
  static constexpr int64_t kTerms = 64;
  static constexpr size_t kLevels = 4;
  /// Most additions that a term passes, up to kTerms^kLevels terms.
  static constexpr int64_t kMostAdditions = kTerms * static_cast<int64_t>(kLevels);

  /// Empties the sum, of `size` components.
  void reset(size_t size) {
    for (std::vector<Real>& level : levels_) level.assign(size, Real{0});
    terms_ = 0;
  }

  /// Begins a vector: the caller adds its components to what is returned.
  std::span<Real> next_term() {
    int64_t full = terms_ / kTerms;
    for (size_t i = 1; i < kLevels && terms_ % kTerms == 0 && full > 0; ++i, full /= kTerms) {
      for (size_t d = 0; d < levels_[i].size(); ++d) levels_[i][d] += levels_[i - 1][d];
      std::fill(levels_[i - 1].begin(), levels_[i - 1].end(), Real{0});
      if (full % kTerms != 0) break;
    }
    ++terms_;
    return levels_[0];
  }

  Real total(size_t d) const {
    Real sum = 0;
    for (size_t i = kLevels; i-- > 0;) sum += levels_[i][d];
    return sum;
  }

 private:
  std::array<std::vector<Real>, kLevels> levels_;
  int64_t terms_ = 0;
};

}  // namespace folio::inline v0::verify
