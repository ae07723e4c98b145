#include <algorithm>

#include "backends/token_pool/device/tree_mask_rule.hpp"
#include "backends/token_pool/draft_tree_checks.hpp"
#include "backends/token_pool/gpu.hpp"
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
using token_pool::TreeMaskShape;

constexpr int32_t kMostNodesOfAWord = 32;

/// What is asked for, without looking at arrays.
TreeMaskShape shape_of(TreeMaskForm form, int32_t draft_token_num, int32_t window_left) {
  require(form >= TreeMaskForm::kFullMask && form <= TreeMaskForm::kTailBits, "the form of the mask is ",
          static_cast<int32_t>(form), "; 0 to 4 are offered");
  require(draft_token_num >= 1, "draft_token_num is ", draft_token_num, "; it must be at least 1");
  if (form == TreeMaskForm::kQlenOnlyBitpacking && draft_token_num > kMostNodesOfAWord) {
    core::fail(ErrorCode::kUnsupported, "draft_token_num is ", draft_token_num, "; words of a node hold up to ",
               kMostNodesOfAWord, " (other forms hold any number)");
  }
  const TreeMaskShape shape{form, draft_token_num, window_left};
  require(window_left >= -1, "window_left is ", window_left, "; it must be -1 (no window) or more");
  if (window_left >= 0 && !shape.is_full()) {
    core::fail(ErrorCode::kUnsupported, "window_left is ", window_left,
               " for a mask without the cached tokens, which a "
               "window cuts off; kFullMask and kFullBits have them");
  }
  return shape;
}

int64_t total_bytes(const TreeMaskShape& shape, std::span<const int32_t> seq_lens) {
  if (!shape.is_full()) return checked_mul(static_cast<int64_t>(seq_lens.size()), shape.request_bytes(0));
  int64_t total = 0;
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    require(seq_lens[r] >= 0, "request ", r, " has length ", seq_lens[r], "; it must not be negative");
    total = checked_add(total, shape.request_bytes(seq_lens[r]));
  }
  return total;
}

void fill_request(const TreeMaskShape& shape, const int32_t* parents, int32_t seq_len, uint8_t* mask) {
  const int64_t cached = shape.cached(seq_len);
  const int64_t row_cells = shape.row_cells(cached);
  std::fill_n(mask, shape.request_bytes(seq_len), uint8_t{0});
  for (int32_t node = 0; node < shape.num_nodes; ++node) {
    const int32_t depth = shape.window_left < 0 ? 0 : depth_of(parents, node);
    const int64_t first = first_cached(cached, depth, shape.window_left);
    const int64_t row = node * row_cells;
    if (shape.is_bytes()) {
      std::fill(mask + row + first, mask + row + cached, uint8_t{1});
      mark_visible(parents, node, shape.window_left, [=](int32_t other) { mask[row + cached + other] = 1; });
    } else {
      set_bits(mask, row + first, row + cached);
      mark_visible(parents, node, shape.window_left, [=](int32_t other) { set_bit(mask, row + cached + other); });
    }
  }
}

}  // namespace

int64_t tree_mask_bytes(TreeMaskForm form, std::span<const int32_t> seq_lens, int32_t draft_token_num) {
  return total_bytes(shape_of(form, draft_token_num, -1), seq_lens);
}

void fill_tree_mask(TreeMaskForm form, std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                    int32_t draft_token_num, std::span<uint8_t> mask, int32_t window_left) {
  const TreeMaskShape shape = shape_of(form, draft_token_num, window_left);
  const int64_t bytes = total_bytes(shape, seq_lens);
  const int64_t num_requests = token_pool::check_parents(parents, draft_token_num);
  token_pool::check_count("seq_lens", static_cast<int64_t>(seq_lens.size()), num_requests);
  require(static_cast<int64_t>(mask.size()) >= bytes, "mask has ", mask.size(), " bytes; this batch's has ", bytes);
  uint8_t* out = mask.data();
  for (int64_t r = 0; r < num_requests; ++r) {
    const int32_t seq_len = seq_lens[static_cast<size_t>(r)];
    fill_request(shape, parents.data() + r * draft_token_num, seq_len, out);
    out += shape.request_bytes(seq_len);
  }
}

void fill_tree_mask(TreeMaskForm form, std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                    int32_t draft_token_num, std::span<uint8_t> mask, DeviceFaults& faults, int32_t window_left,
                    Stream stream) {
  if (faults.device().type == DeviceType::kCpu) {
    fill_tree_mask(form, parents, seq_lens, draft_token_num, mask, window_left);
    return;
  }
  token_pool::TreeMaskJob job;
  job.shape = shape_of(form, draft_token_num, window_left);
  const int64_t num_requests =
      token_pool::requests_of("parents", static_cast<int64_t>(parents.size()), draft_token_num);
  token_pool::check_count("seq_lens", static_cast<int64_t>(seq_lens.size()), num_requests);
  // What masks have without any cached token.
  const int64_t least = checked_mul(num_requests, job.shape.request_bytes(0));
  require(static_cast<int64_t>(mask.size()) >= least, "mask has ", mask.size(), " bytes; this batch's has ", least,
          " or more");
  job.parents = parents.data();
  job.seq_lens = seq_lens.data();
  job.num_requests = core::checked_cast<int32_t>(num_requests);
  job.mask = mask.data();
  job.capacity = static_cast<int64_t>(mask.size());
  token_pool::gpu::fill_tree_mask(faults.device().index, job, faults.report(), stream);
}

}  // namespace folio::inline v0::backends
