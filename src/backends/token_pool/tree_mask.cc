#include <algorithm>

#include "backends/token_pool/device/draft_tree_rule.hpp"
#include "backends/token_pool/draft_tree_checks.hpp"
#include "backends/token_pool/request_table.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"

namespace folio::inline v0::backends {
namespace {

using core::checked_add;
using core::checked_mul;
using core::require;
using token_pool::depth_of;
using token_pool::first_cached;
using token_pool::mark_visible;
using token_pool::set_bit;
using token_pool::set_bits;

constexpr int32_t kMostNodesOfAWord = 32;

bool is_full(TreeMaskForm form) {
  return form == TreeMaskForm::kFullMask || form == TreeMaskForm::kFullBits;
}

/// Bytes of a row of kQlenOnlyBitpacking.
int64_t word_bytes(int32_t nodes) {
  return nodes <= 8 ? 1 : nodes <= 16 ? 2 : 4;
}

/// Bytes of one request's part.
int64_t request_bytes(TreeMaskForm form, int32_t seq_len, int32_t nodes) {
  const int64_t columns = is_full(form) ? int64_t{seq_len} + nodes : nodes;
  const bool bits = form == TreeMaskForm::kFullBits || form == TreeMaskForm::kTailBits;
  if (form == TreeMaskForm::kQlenOnlyBitpacking) return nodes * word_bytes(nodes);
  const int64_t cells = checked_mul(int64_t{nodes}, columns);
  return bits ? core::ceil_div(cells, int64_t{8}) : cells;
}

void fill_request(TreeMaskForm form, const int32_t* parents, int32_t seq_len, int32_t nodes, int32_t window_left,
                  uint8_t* mask) {
  const int64_t cached = is_full(form) ? seq_len : 0;
  const int64_t columns = cached + nodes;
  const bool bytes = form == TreeMaskForm::kFullMask || form == TreeMaskForm::kQlenOnly;
  const int64_t row_bits = form == TreeMaskForm::kQlenOnlyBitpacking ? word_bytes(nodes) * 8 : columns;
  std::fill_n(mask, request_bytes(form, seq_len, nodes), uint8_t{0});
  for (int32_t node = 0; node < nodes; ++node) {
    const int64_t first = first_cached(cached, window_left < 0 ? 0 : depth_of(parents, node), window_left);
    if (bytes) {
      uint8_t* const row = mask + node * columns;
      std::fill(row + first, row + cached, uint8_t{1});
      mark_visible(parents, node, window_left, [row, cached](int32_t other) { row[cached + other] = 1; });
    } else {
      const int64_t row = node * row_bits;
      set_bits(mask, row + first, row + cached);
      mark_visible(parents, node, window_left,
                   [mask, row, cached](int32_t other) { set_bit(mask, row + cached + other); });
    }
  }
}

}  // namespace

int64_t tree_mask_bytes(TreeMaskForm form, std::span<const int32_t> seq_lens, int32_t draft_token_num) {
  require(form >= TreeMaskForm::kFullMask && form <= TreeMaskForm::kTailBits, "the form of the mask is ",
          static_cast<int32_t>(form), "; 0 to 4 are offered");
  require(draft_token_num >= 1, "draft_token_num is ", draft_token_num, "; it must be at least 1");
  if (form == TreeMaskForm::kQlenOnlyBitpacking && draft_token_num > kMostNodesOfAWord) {
    core::fail(ErrorCode::kUnsupported, "draft_token_num is ", draft_token_num, "; words of a node hold up to ",
               kMostNodesOfAWord, " (other forms hold any number)");
  }
  if (!is_full(form)) {
    return checked_mul(static_cast<int64_t>(seq_lens.size()), request_bytes(form, 0, draft_token_num));
  }
  int64_t total = 0;
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    require(seq_lens[r] >= 0, "request ", r, " has length ", seq_lens[r], "; it must not be negative");
    total = checked_add(total, request_bytes(form, seq_lens[r], draft_token_num));
  }
  return total;
}

void fill_tree_mask(TreeMaskForm form, std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                    int32_t draft_token_num, std::span<uint8_t> mask, int32_t window_left) {
  const int64_t bytes = tree_mask_bytes(form, seq_lens, draft_token_num);
  const int64_t num_requests = token_pool::check_parents(parents, draft_token_num);
  require(window_left >= -1, "window_left is ", window_left, "; it must be -1 (no window) or more");
  if (window_left >= 0 && !is_full(form)) {
    core::fail(ErrorCode::kUnsupported, "window_left is ", window_left,
               " for a mask without the cached tokens, which a "
               "window cuts off; kFullMask and kFullBits have them");
  }
  token_pool::check_count("seq_lens", static_cast<int64_t>(seq_lens.size()), num_requests);
  require(static_cast<int64_t>(mask.size()) >= bytes, "mask has ", mask.size(), " bytes; this batch's has ", bytes);
  uint8_t* out = mask.data();
  for (int64_t r = 0; r < num_requests; ++r) {
    const int32_t seq_len = seq_lens[static_cast<size_t>(r)];
    fill_request(form, parents.data() + r * draft_token_num, seq_len, draft_token_num, window_left, out);
    out += request_bytes(form, seq_len, draft_token_num);
  }
}

}  // namespace folio::inline v0::backends
