#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"

namespace folio::inline v0 {

/// Neighbouring rows [begin, end) of a page table, two or more, whose first `pages` entries are the same page ids. It
/// is maximal: no row beside it has them too, and its rows do not all have one entry more in common.
struct SharedPrefix {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t pages = 0;    ///< >= 1
  int32_t parent = -1;  ///< number of the smallest shared prefix around it, which is shorter; -1 = none
  friend bool operator==(const SharedPrefix&, const SharedPrefix&) = default;
};

/// Finds what the requests of a batch share, from their page tables alone. Keeps its memory from call to call and
/// allocates nothing once it has seen the largest batch. Not safe for simultaneous use by several threads. Host memory
/// only.
class FOLIO_API SharedPrefixFinder {
 public:
  /// All shared prefixes of neighbouring rows among the first full_pages[r] pages of each row r: a forest in which
  /// prefixes stand after those inside them, and those that do not nest stand in the order of their rows. At most
  /// rows - 1. `full_pages` may be shorter than the table; rows of 0 pages share nothing.
  ///
  /// Page ids are compared from the first on until they differ: nothing is assumed about how an engine shares pages.
  /// O(rows + shared entries); rows that share nothing cost one comparison each, however long they are.
  ///
  /// The result is valid until the next call. Throws kInvalidArgument naming a row whose pages do not lie in the table
  /// or are fewer than 0.
  std::span<const SharedPrefix> find(const PageTableView& table, std::span<const int32_t> full_pages);

  /// Reorders row numbers of the table so that rows with common prefixes become neighbours, the longer ones nearer: a
  /// hint for engines that may choose the order of a batch (one call for each class of requests that must stay
  /// together). A run of sharers takes the place of its first member; rows that share nothing keep their order.
  /// full_pages[r] is row r's, not that of rows[r]. O(n log n) comparisons of rows. Throws as `find`, and for row
  /// numbers outside full_pages.
  void order(const PageTableView& table, std::span<const int32_t> full_pages, std::span<int32_t> rows);

 private:
  struct Open {  ///< a prefix whose last row is not known yet
    int32_t pages;
    int32_t begin;
  };
  struct Place {  ///< a row to be ordered
    std::span<const int32_t> pages;
    int32_t row;
    int32_t position;
    int32_t leader;
  };
  std::vector<SharedPrefix> prefixes_;
  std::vector<Open> open_;
  std::vector<int32_t> around_;
  std::vector<Place> places_;
};

}  // namespace folio::inline v0
