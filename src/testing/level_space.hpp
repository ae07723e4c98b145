#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "folio/context.hpp"
#include "folio/verify.hpp"
#include "testing/random.hpp"

namespace folio::inline v0::verify {

/// The space that cases are drawn from, as numbers: column 0 is the kernel, column i + 1 is factor i; a level's id
/// counts over all columns. Two kinds of conflicts: pairs of levels (factors.hpp), and pairs that a kernel refuses.
class LevelSpace {
 public:
  static constexpr int32_t kMaxIds = 192;
  using IdSet = std::bitset<kMaxIds>;
  using Row = std::vector<int32_t>;  ///< a level of every column; -1 = not chosen yet

  /// Asks every kernel about every pair of levels. Throws kInvalidArgument for a kernel that this build does not have.
  explicit LevelSpace(std::span<const std::string> kernels);

  int32_t num_columns() const { return static_cast<int32_t>(first_id_.size()) - 1; }
  int32_t num_levels(int32_t column) const { return first_id_[column + 1] - first_id_[column]; }

  /// The levels that go with everything chosen in `row`.
  IdSet allowed(const Row& row) const;
  bool is_allowed(const IdSet& allowed, int32_t column, int32_t level) const {
    return allowed[static_cast<size_t>(first_id_[column] + level)];
  }
  /// `allowed`, once `level` of `column` is chosen too. `kernel` is row[0], or -1.
  IdSet narrowed(const IdSet& allowed, int32_t kernel, int32_t column, int32_t level) const;

  /// True if the chosen levels go together and the others can be chosen. Searches, with backtracking.
  bool can_complete(const Row& row) const;

  ConformanceCase to_case(const Row& row, uint64_t seed) const;

  /// Level 0 of every factor, but for at most two that the kernel wants otherwise: the plainest row that it takes.
  /// Throws kInvalidArgument if there is none.
  Row plainest(int32_t kernel) const;

 private:
  bool search(Row& row, const IdSet& allowed) const;
  void ask_kernel(int32_t kernel);

  bool takes(const Row& row) const;

  std::map<bool, Context> contexts_;  ///< to ask kernels with: of a GPU, of the CPU
  std::vector<std::string> kernels_;
  std::vector<int32_t> first_id_;
  std::vector<IdSet> compatible_;                      ///< [id]
  std::vector<std::vector<IdSet>> kernel_compatible_;  ///< [kernel][id]
};

}  // namespace folio::inline v0::verify
