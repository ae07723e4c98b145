#include "backends/token_pool/tree_window.hpp"

#include <algorithm>

#include "backends/token_pool/device/draft_tree_rule.hpp"
#include "core/checked_math.hpp"

namespace folio::inline v0::backends::token_pool {
namespace {

/// One request's drafts.
struct Tree {
  const uint8_t* bits;
  int64_t n;
  bool sees(int64_t row, int64_t column) const {
    const int64_t bit = row * n + column;
    return ((bits[bit / 8] >> (bit % 8)) & 1) != 0;
  }
  /// Drafts that it sees, without itself.
  int64_t depth(int64_t row) const {
    int64_t seen = 0;
    for (int64_t column = 0; column < n; ++column) seen += sees(row, column) ? 1 : 0;
    return seen - 1;
  }
};

}  // namespace

void window_tree_mask(std::span<const uint8_t> tree, int32_t n, int32_t window_left, std::span<const int32_t> lens,
                      std::span<const int32_t> first_pos, std::span<const int32_t> seq_lens,
                      std::vector<uint8_t>& mask) {
  int64_t bytes = 0;
  for (const int32_t len : lens) bytes += core::ceil_div(int64_t{n} * len, int64_t{8});
  mask.assign(static_cast<size_t>(bytes), 0);
  const int64_t tree_bytes = core::ceil_div(int64_t{n} * n, int64_t{8});
  uint8_t* block = mask.data();
  for (size_t r = 0; r < lens.size(); ++r) {
    const Tree drafts{tree.data() + static_cast<int64_t>(r) * tree_bytes, n};
    const int64_t cached = lens[r] - n;
    for (int64_t row = 0; row < n; ++row) {
      const int64_t depth = drafts.depth(row);
      const int64_t oldest = seq_lens[r] + depth - window_left;
      const int64_t line = row * lens[r];
      set_bits(block, line + std::max<int64_t>(0, oldest - first_pos[r]), line + cached);
      for (int64_t column = 0; column < n; ++column) {
        const bool near = depth - drafts.depth(column) <= window_left;
        if (near && drafts.sees(row, column)) set_bit(block, line + cached + column);
      }
    }
    block += core::ceil_div(int64_t{n} * lens[r], int64_t{8});
  }
}

}  // namespace folio::inline v0::backends::token_pool
