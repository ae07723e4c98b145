#include <algorithm>
#include <array>
#include <numeric>

#include "core/error.hpp"
#include "folio/attention.hpp"
#include "folio/verify.hpp"
#include "testing/executors.hpp"
#include "testing/factors.hpp"
#include "testing/level_space.hpp"
#include "testing/random.hpp"

namespace folio::inline v0::verify {
namespace {

using Row = LevelSpace::Row;

/// Which triples of levels still have to be covered. Smaller strengths are triples too: dummy columns with one level,
/// which every counted triple contains, make up the difference.
class Uncovered {
 public:
  Uncovered(const LevelSpace& space, int32_t strength) : num_real_(space.num_columns()) {
    for (int32_t c = 0; c < num_real_; ++c) levels_.push_back(space.num_levels(c));
    for (int32_t d = strength; d < 3; ++d) levels_.push_back(1);
    const int32_t n = num_columns();
    groups_.resize(static_cast<size_t>(n * n * n));
    for (int32_t i = 0; i < n; ++i) {
      for (int32_t j = i + 1; j < n; ++j) {
        for (int32_t k = j + 1; k < n; ++k) {
          const int32_t dummies = (i >= num_real_) + (j >= num_real_) + (k >= num_real_);
          if (dummies == 3 - strength) add_group(space, i, j, k);
        }
      }
    }
  }

  int32_t num_columns() const { return static_cast<int32_t>(levels_.size()); }
  int32_t num_levels(int32_t column) const { return levels_[static_cast<size_t>(column)]; }
  bool is_dummy(int32_t column) const { return column >= num_real_; }
  int64_t tuples() const { return tuples_; }
  int64_t valid() const { return valid_; }
  int64_t left() const { return left_; }

  /// How many uncovered triples `row` would cover anew by taking `level` of `column`.
  int32_t gain(const Row& row, int32_t column, int32_t level) const {
    int32_t gain = 0;
    for (int32_t j = 0; j < num_columns(); ++j) {
      if (j == column || row[static_cast<size_t>(j)] < 0) continue;
      for (int32_t k = j + 1; k < num_columns(); ++k) {
        if (k == column || row[static_cast<size_t>(k)] < 0) continue;
        gain += is_open(ordered({column, level}, {j, row[static_cast<size_t>(j)]}, {k, row[static_cast<size_t>(k)]}));
      }
    }
    return gain;
  }

  /// Marks what a whole row covers; returns how many were new.
  int64_t cover(const Row& row) {
    const int64_t before = left_;
    for (Group& group : groups_) {
      if (group.open.empty()) continue;
      auto bit = group.open.begin() + position(group, row[static_cast<size_t>(group.columns[0])],
                                               row[static_cast<size_t>(group.columns[1])],
                                               row[static_cast<size_t>(group.columns[2])]);
      if (*bit == 0) continue;
      *bit = 0;
      --group.left;
      --left_;
    }
    return before - left_;
  }

  /// Puts an uncovered triple into an empty row: one of the three columns that have most of them left.
  void seed_row(Random& random, Row& row) const {
    const auto most = std::max_element(groups_.begin(), groups_.end(),
                                       [](const Group& a, const Group& b) { return a.left < b.left; });
    int32_t skip = random.below(most->left);
    for (size_t i = 0; i < most->open.size(); ++i) {
      if (most->open[i] == 0 || skip-- > 0) continue;
      auto rest = static_cast<int32_t>(i);
      for (size_t c = 3; c-- > 0;) {
        row[static_cast<size_t>(most->columns[c])] = rest % num_levels(most->columns[c]);
        rest /= num_levels(most->columns[c]);
      }
      return;
    }
  }

 private:
  struct Group {
    std::array<int32_t, 3> columns{};
    std::vector<uint8_t> open;  ///< per triple of levels: valid and not covered yet
    int32_t left = 0;
  };
  struct Choice {
    int32_t column, level;
  };

  size_t group_index(int32_t i, int32_t j, int32_t k) const {
    return static_cast<size_t>((i * num_columns() + j) * num_columns() + k);
  }
  int32_t position(const Group& group, int32_t a, int32_t b, int32_t c) const {
    return (a * num_levels(group.columns[1]) + b) * num_levels(group.columns[2]) + c;
  }
  static std::array<Choice, 3> ordered(Choice a, Choice j, Choice k) {  // j < k already
    if (a.column < j.column) return {a, j, k};
    if (a.column < k.column) return {j, a, k};
    return {j, k, a};
  }
  int32_t is_open(const std::array<Choice, 3>& t) const {
    const Group& group = groups_[group_index(t[0].column, t[1].column, t[2].column)];
    if (group.left == 0) return 0;
    return group.open[static_cast<size_t>(position(group, t[0].level, t[1].level, t[2].level))];
  }

  void add_group(const LevelSpace& space, int32_t i, int32_t j, int32_t k) {
    Group& group = groups_[group_index(i, j, k)];
    group.columns = {i, j, k};
    Row row(static_cast<size_t>(num_columns()), -1);
    for (int32_t a = 0; a < num_levels(i); ++a) {
      for (int32_t b = 0; b < num_levels(j); ++b) {
        for (int32_t c = 0; c < num_levels(k); ++c) {
          row[static_cast<size_t>(i)] = a;
          row[static_cast<size_t>(j)] = b;
          row[static_cast<size_t>(k)] = c;
          const bool valid = space.can_complete({row.begin(), row.begin() + num_real_});
          group.open.push_back(valid ? 1 : 0);
          group.left += valid ? 1 : 0;
        }
      }
    }
    tuples_ += static_cast<int64_t>(group.open.size());
    valid_ += group.left;
    left_ += group.left;
  }

  int32_t num_real_;
  std::vector<int32_t> levels_;
  std::vector<Group> groups_;
  int64_t tuples_ = 0, valid_ = 0, left_ = 0;
};

void shuffle(Random& random, std::vector<int32_t>& values) {
  for (size_t i = values.size(); i > 1; --i)
    std::swap(values[i - 1], values[static_cast<size_t>(random.below(static_cast<int32_t>(i)))]);
}

/// Chooses the columns still open, in random order, each time the level that covers most. False at a dead end.
bool fill(const LevelSpace& space, const Uncovered& uncovered, Random& random, Row& row, int64_t& gained) {
  std::vector<int32_t> order(static_cast<size_t>(uncovered.num_columns()));
  std::iota(order.begin(), order.end(), 0);
  shuffle(random, order);
  std::stable_partition(order.begin(), order.end(), [](int32_t c) { return c == 0; });  // the kernel brings conflicts
  LevelSpace::IdSet allowed = space.allowed({row.begin(), row.begin() + space.num_columns()});
  for (const int32_t column : order) {
    int32_t& chosen = row[static_cast<size_t>(column)];
    if (chosen >= 0) continue;
    int32_t best_gain = -1;
    int32_t best = -1;
    const int32_t start = random.below(uncovered.num_levels(column));  // ties fall to a random level
    for (int32_t step = 0; step < uncovered.num_levels(column); ++step) {
      const int32_t level = (start + step) % uncovered.num_levels(column);
      if (!uncovered.is_dummy(column) && !space.is_allowed(allowed, column, level)) continue;
      const int32_t gain = uncovered.gain(row, column, level);
      if (gain > best_gain) best_gain = gain, best = level;
    }
    if (best < 0) return false;
    chosen = best;
    gained += best_gain;
    if (!uncovered.is_dummy(column)) allowed = space.allowed({row.begin(), row.begin() + space.num_columns()});
  }
  return space.can_complete({row.begin(), row.begin() + space.num_columns()});
}

/// Any valid completion: the seed triple is valid, so there is one.
Row random_row(const LevelSpace& space, Random& random, Row row) {
  std::vector<int32_t> order(static_cast<size_t>(space.num_columns()));
  std::iota(order.begin(), order.end(), 0);
  shuffle(random, order);
  for (const int32_t column : order) {
    int32_t& chosen = row[static_cast<size_t>(column)];
    if (chosen >= 0) continue;
    const int32_t start = random.below(space.num_levels(column));
    for (int32_t step = 0; step < space.num_levels(column); ++step) {
      chosen = (start + step) % space.num_levels(column);
      if (space.can_complete(row)) break;
    }
  }
  return row;
}

}  // namespace

std::vector<std::string> runnable_kernels() {
  return runnable_kernels(pool_context(1));
}

std::vector<std::string> runnable_kernels(const Context& context) {
  std::vector<std::string> names;
  for (const KernelAnswer& answer : explain(context, kernel_question(ConformanceCase{}))) {
    if (answer.available) names.push_back(answer.name);
  }
  return names;
}

CoveringArray covering_array(std::span<const std::string> kernels, int32_t strength, uint64_t seed) {
  core::require(strength >= 1 && strength <= 3, "strength is ", strength, "; it must be 1, 2 or 3");
  constexpr int32_t kCandidates = 6;  // more make the array a little smaller and its generation slower
  const LevelSpace space(kernels);
  Uncovered uncovered(space, strength);
  Random random(seed);
  CoveringArray out;
  out.coverage = {strength, uncovered.tuples(), uncovered.valid(), 0};
  while (uncovered.left() > 0) {
    Row seeded(static_cast<size_t>(uncovered.num_columns()), -1);
    uncovered.seed_row(random, seeded);
    Row best;
    int64_t best_gain = -1;
    for (int32_t candidate = 0; candidate < kCandidates; ++candidate) {
      Row row = seeded;
      int64_t gained = 0;
      if (fill(space, uncovered, random, row, gained) && gained > best_gain) best_gain = gained, best = row;
    }
    if (best.empty()) {  // every greedy order met a dead end
      best = random_row(space, random, {seeded.begin(), seeded.begin() + space.num_columns()});
      best.resize(seeded.size(), 0);
    }
    out.coverage.covered += uncovered.cover(best);
    out.cases.push_back(space.to_case(best, random.next()));
  }
  return out;
}

std::vector<ConformanceCase> random_cases(std::span<const std::string> kernels, int64_t count, uint64_t seed) {
  const LevelSpace space(kernels);
  Random random(seed);
  std::vector<ConformanceCase> cases;
  for (int64_t i = 0; i < count; ++i) {
    const Row row = random_row(space, random, Row(static_cast<size_t>(space.num_columns()), -1));
    cases.push_back(space.to_case(row, random.next()));
  }
  return cases;
}

}  // namespace folio::inline v0::verify
