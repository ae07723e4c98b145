#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "folio/cascade.hpp"
#include "folio/shared_prefix.hpp"

namespace folio::inline v0::attention {

/// Requests [begin, end) read pages [first_page, end_page) of their tables together.
struct CascadeGroup {
  int32_t level = 0;  ///< shared prefixes around it that were taken too
  int32_t begin = 0;
  int32_t end = 0;
  int32_t first_page = 0;
  int32_t end_page = 0;
  friend bool operator==(const CascadeGroup&, const CascadeGroup&) = default;
};

/// Chooses which of a batch's shared prefixes are read together. Keeps its memory from call to call.
class CascadeLevels {
 public:
  /// The choice with at most `max_levels` groups around any request that saves most, by dynamic programming from the
  /// innermost prefixes outwards: for each prefix, each prefix around it that may have been taken last and each number
  /// of levels left, taking and leaving it are compared. Prefixes that cannot pay, and those inside 16 others that
  /// can, are left out; one that saves nothing is not taken. Groups of a level stand
  /// in the order of their requests. `prefixes` as SharedPrefixFinder gives them.
  std::span<const CascadeGroup> choose(const CascadeCosts& costs, int32_t max_levels, const CascadeBatch& batch,
                                       std::span<const SharedPrefix> prefixes);

  /// What the last choice saves, in bytes over one KV head.
  int64_t saved() const { return saved_; }

 private:
  struct Candidate {
    SharedPrefix prefix;  ///< its parent is a candidate's number
    int32_t depth;        ///< candidates around it
  };
  /// The best that can be done in one prefix and inside it, given what was taken around it.
  struct Best {
    int64_t saved;
    bool taken;
  };
  void count_rows();
  void collect(std::span<const SharedPrefix> prefixes);
  void weigh();
  void take();
  int64_t saving(const SharedPrefix& prefix, int32_t first_page, bool outermost) const;
  int64_t most_saving(const SharedPrefix& prefix) const;
  int64_t own_tokens(const SharedPrefix& prefix, int32_t first_page) const;
  int64_t group_tokens(const SharedPrefix& prefix, int32_t first_page) const;
  int64_t row_cost(const SharedPrefix& prefix, bool outermost) const;
  int64_t group_reads(const SharedPrefix& prefix) const;
  size_t cell(int32_t candidate, int32_t around, int32_t levels) const;
  int32_t page_taken_before(int32_t candidate, int32_t around) const;

  const CascadeCosts* costs_ = nullptr;
  const CascadeBatch* batch_ = nullptr;
  int32_t max_levels_ = 0;
  int64_t saved_ = 0;
  std::vector<int64_t> rows_before_;   ///< [R + 1] packed rows of earlier requests
  std::vector<int64_t> reads_before_;  ///< [R + 1] times that earlier requests read their keys on their own
  std::vector<Candidate> candidates_;
  std::vector<int32_t> numbers_;    ///< prefix -> candidate, or -1
  std::vector<Best> best_;          ///< see cell()
  std::vector<int64_t> inside_;     ///< the same cells: the sum over the candidates directly inside
  std::vector<int32_t> decisions_;  ///< per candidate: the cell that the chosen whole leads to
  std::vector<CascadeGroup> groups_;
};

}  // namespace folio::inline v0::attention
