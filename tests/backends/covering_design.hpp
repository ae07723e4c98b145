#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "testing/random.hpp"

namespace folio::backends::testing {

/// Which value of each axis a row has.
using DesignRow = std::vector<int32_t>;

/// Rows in which every pair of values of two axes occurs together, few of them; always the same for a seed. Greedy: a
/// row begins with a pair that is still missing and takes, axis by axis, the value that covers most.
inline std::vector<DesignRow> covering_design(const std::vector<int32_t>& num_values, uint64_t seed) {
  const size_t num_axes = num_values.size();
  std::vector<size_t> first(num_axes);  // of an axis's values among all
  size_t total = 0;
  for (size_t axis = 0; axis < num_axes; ++axis) {
    first[axis] = total;
    total += static_cast<size_t>(num_values[axis]);
  }
  std::vector<uint8_t> missing(total * total, 0);
  size_t num_missing = 0;
  const auto at = [&](size_t axis, int32_t value) { return first[axis] + static_cast<size_t>(value); };
  for (size_t a = 0; a < num_axes; ++a) {
    for (size_t b = a + 1; b < num_axes; ++b) {
      for (int32_t i = 0; i < num_values[a]; ++i) {
        for (int32_t j = 0; j < num_values[b]; ++j) {
          missing[at(a, i) * total + at(b, j)] = missing[at(b, j) * total + at(a, i)] = 1;
          ++num_missing;
        }
      }
    }
  }
  verify::Random random(seed);
  std::vector<DesignRow> rows;
  while (num_missing > 0) {
    DesignRow row(num_axes, -1);
    const auto begin = static_cast<size_t>(std::ranges::find(missing, uint8_t{1}) - missing.begin());
    for (const size_t value : {begin / total, begin % total}) {
      size_t axis = num_axes - 1;
      while (first[axis] > value) --axis;
      row[axis] = static_cast<int32_t>(value - first[axis]);
    }
    for (size_t axis = 0; axis < num_axes; ++axis) {
      if (row[axis] >= 0) continue;
      int32_t most = -1;
      const int32_t start = random.below(num_values[axis]);  // ties fall to a random value
      for (int32_t step = 0; step < num_values[axis]; ++step) {
        const int32_t value = (start + step) % num_values[axis];
        int32_t gain = 0;
        for (size_t other = 0; other < num_axes; ++other) {
          if (row[other] >= 0 && other != axis) gain += missing[at(axis, value) * total + at(other, row[other])];
        }
        if (gain > most) most = gain, row[axis] = -2 - value;
      }
      row[axis] = -2 - row[axis];
    }
    for (size_t a = 0; a < num_axes; ++a) {
      for (size_t b = a + 1; b < num_axes; ++b) {
        num_missing -= missing[at(a, row[a]) * total + at(b, row[b])];
        missing[at(a, row[a]) * total + at(b, row[b])] = missing[at(b, row[b]) * total + at(a, row[a])] = 0;
      }
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace folio::backends::testing
