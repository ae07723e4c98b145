#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace folio::inline v0::backends::token_pool {

/// The custom mask of drafts that form a tree and see through a window: a draft stands at seq_len + its depth, which
/// the number of drafts that it sees gives, and sees what lies at most `window_left` before that.
/// - tree: as SpecInfo::tree_mask, `n` drafts a request.
/// - lens, first_pos: [R], the keys that each request reads, its drafts last.
/// - seq_lens: [R], tokens before the drafts.
/// Writes `mask`: blocks of n x lens[r] bits, each from a byte of its own. O(R * n * lens).
void window_tree_mask(std::span<const uint8_t> tree, int32_t n, int32_t window_left, std::span<const int32_t> lens,
                      std::span<const int32_t> first_pos, std::span<const int32_t> seq_lens,
                      std::vector<uint8_t>& mask);

}  // namespace folio::inline v0::backends::token_pool
