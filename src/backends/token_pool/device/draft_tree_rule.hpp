#pragma once

#include <cstdint>

#include "folio/types/export.hpp"

/// Trees of draft tokens, one node at a time: bodies that a device kernel, a thread a node, can run too.
namespace folio::inline v0::backends::token_pool {

inline constexpr int32_t kNoParent = -2;  ///< the parent is not selected; -1 is the root's

/// The node of one request whose candidate `selected[node - 1]` extends; its parent, or kNoParent. `selected` ascends
/// up to this node; num_extensions entries of parent_list may be read.
FOLIO_HOST_DEVICE constexpr int32_t parent_node(const int64_t* parent_list, int64_t num_extensions,
                                                const int64_t* selected, int32_t topk, int32_t node) {
  const int64_t extension = selected[node - 1] / topk;
  if (extension == 0) return 0;
  if (extension >= num_extensions) return kNoParent;
  const int64_t candidate = parent_list[extension];
  int32_t low = 0;
  int32_t high = node - 1;  // only what is selected before the node can be its parent
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (selected[middle] < candidate) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < node - 1 && selected[low] == candidate ? low + 1 : kNoParent;
}

/// Ancestors of a node.
FOLIO_HOST_DEVICE constexpr int32_t depth_of(const int32_t* parents, int32_t node) {
  int32_t depth = 0;
  for (; parents[node] >= 0; node = parents[node]) ++depth;
  return depth;
}

/// Calls mark(other) for the node and each of its ancestors, or the nearest window_left (>= 0) of them: what it sees of
/// the tree.
template <typename Mark>
FOLIO_HOST_DEVICE constexpr void mark_visible(const int32_t* parents, int32_t node, int32_t window_left, Mark&& mark) {
  for (; node >= 0; node = parents[node]) {
    mark(node);
    if (window_left-- == 0) break;
  }
}

/// The first of `cached` tokens before the root that a node at `depth` sees.
FOLIO_HOST_DEVICE constexpr int64_t first_cached(int64_t cached, int32_t depth, int32_t window_left) {
  const int64_t first = window_left < 0 ? 0 : cached + depth - window_left;
  return first < 0 ? 0 : (first < cached ? first : cached);
}

FOLIO_HOST_DEVICE constexpr void set_bit(uint8_t* bytes, int64_t bit) {
  bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] | 1u << bit % 8);
}

/// Sets bits [begin, end) of a little-endian row of bits.
FOLIO_HOST_DEVICE constexpr void set_bits(uint8_t* bytes, int64_t begin, int64_t end) {
  for (; begin < end && begin % 8 != 0; ++begin) set_bit(bytes, begin);
  for (; begin + 8 <= end; begin += 8) bytes[begin / 8] = 0xff;
  for (; begin < end; ++begin) set_bit(bytes, begin);
}

}  // namespace folio::inline v0::backends::token_pool
