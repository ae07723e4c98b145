#pragma once

#include <cstdint>

#include "backends/token_pool/device/list_report.hpp"
#include "folio/types/export.hpp"

/// Trees of draft tokens, one node at a time: bodies that a device kernel, a thread a node, runs too. Whatever arrays
/// hold, a walk ends and stays inside them: where the host refuses, a device reports and goes on.
namespace folio::inline v0::backends::token_pool {

inline constexpr int32_t kNoParent = -2;  ///< the parent is not selected; -1 is the root's

/// Whether candidate `a` is taken before candidate `b`: the higher score, of equal ones the lower number. A NaN is as
/// low as a score can be.
FOLIO_HOST_DEVICE constexpr bool goes_before(const float* scores, int64_t a, int64_t b) {
  const bool a_is_nan = scores[a] != scores[a];
  const bool b_is_nan = scores[b] != scores[b];
  if (a_is_nan || b_is_nan) return a_is_nan == b_is_nan ? a < b : b_is_nan;
  return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
}

/// Whether a candidate is one of the `count` best.
FOLIO_HOST_DEVICE constexpr bool is_selected(const float* scores, int64_t num_scores, int64_t count,
                                             int64_t candidate) {
  int64_t before = 0;
  for (int64_t other = 0; other < num_scores && before < count; ++other) {
    before += goes_before(scores, other, candidate) ? 1 : 0;
  }
  return before < count;
}

/// The node of one request whose candidate `selected[node - 1]` extends; its parent, or kNoParent. `selected` ascends
/// up to this node; num_extensions entries of parent_list may be read.
FOLIO_HOST_DEVICE constexpr int32_t parent_node(const int64_t* parent_list, int64_t num_extensions,
                                                const int64_t* selected, int32_t topk, int32_t node) {
  const int64_t extension = selected[node - 1] / topk;
  if (extension == 0) return 0;
  if (extension < 0 || extension >= num_extensions) return kNoParent;
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

/// What is wrong with what is selected as a node of `request`.
FOLIO_HOST_DEVICE constexpr ListReport selection_fault(const int64_t* parent_list, int64_t num_extensions,
                                                       const int64_t* selected, int64_t num_candidates, int32_t topk,
                                                       int32_t request, int32_t node) {
  const int64_t candidate = selected[node - 1];
  if (candidate < 0 || candidate >= num_candidates) {
    return {0, KvRangeFault::kCandidate, request, node, candidate, num_candidates};
  }
  if (node > 1 && selected[node - 2] >= candidate) {
    return {0, KvRangeFault::kOrder, request, node, candidate, selected[node - 2]};
  }
  if (parent_node(parent_list, num_extensions, selected, topk, node) == kNoParent) {
    return {0, KvRangeFault::kLostParent, request, node, candidate, 0};
  }
  return {};
}

/// What is wrong with a node's parent.
FOLIO_HOST_DEVICE constexpr ListReport parent_fault(const int32_t* parents, int32_t request, int32_t node) {
  const int32_t parent = parents[node];
  if (node == 0) return parent == -1 ? ListReport{} : ListReport{0, KvRangeFault::kRoot, request, node, parent, -1};
  return parent >= 0 && parent < node ? ListReport{}
                                      : ListReport{0, KvRangeFault::kParent, request, node, parent, node};
}

/// The parent of a node, -1 of the root; one that is none before it is taken for the root.
FOLIO_HOST_DEVICE constexpr int32_t parent_of(const int32_t* parents, int32_t node) {
  if (node == 0) return -1;
  return parents[node] >= 0 && parents[node] < node ? parents[node] : 0;
}

/// Ancestors of a node.
FOLIO_HOST_DEVICE constexpr int32_t depth_of(const int32_t* parents, int32_t node) {
  int32_t depth = 0;
  for (; node > 0; node = parent_of(parents, node)) ++depth;
  return depth;
}

/// The first child of a node, with `child_of` = node and `after` = node; the next child of its parent behind it, with
/// `child_of` = its parent and `after` = node. -1: none.
FOLIO_HOST_DEVICE constexpr int32_t next_child(const int32_t* parents, int32_t num_nodes, int32_t child_of,
                                               int32_t after) {
  for (int32_t node = after + 1; node < num_nodes; ++node) {
    if (parent_of(parents, node) == child_of) return node;
  }
  return -1;
}

/// Whether `node` sees `other` of the tree: itself and its ancestors, the nearest window_left (>= 0) of them.
FOLIO_HOST_DEVICE constexpr bool sees_node(const int32_t* parents, int32_t node, int32_t other, int32_t window_left) {
  for (; node > other; node = parent_of(parents, node)) {
    if (window_left-- == 0) return false;
  }
  return node == other;
}

/// Calls mark(other) for the node and each of its ancestors, or the nearest window_left (>= 0) of them: what it sees of
/// the tree.
template <typename Mark>
FOLIO_HOST_DEVICE constexpr void mark_visible(const int32_t* parents, int32_t node, int32_t window_left, Mark&& mark) {
  for (; node >= 0; node = parent_of(parents, node)) {
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

/// Taking the best candidates of B requests.
struct DraftSelectionJob {
  const float* scores = nullptr;
  const int64_t* tokens = nullptr;
  const int64_t* bonus_tokens = nullptr;
  int32_t num_requests = 0;
  int32_t num_candidates = 0;
  int32_t num_nodes = 1;
  int64_t* selected = nullptr;
  int64_t* draft_tokens = nullptr;
};

/// Writes the candidate that is the request's node `node`; the root with candidate -1.
FOLIO_HOST_DEVICE constexpr void write_selected(const DraftSelectionJob& job, int32_t r, int32_t node,
                                                int32_t candidate) {
  int64_t* const drafts = job.draft_tokens + int64_t{r} * job.num_nodes;
  if (candidate < 0) {
    drafts[0] = job.bonus_tokens[r];
    return;
  }
  drafts[node] = job.tokens[int64_t{r} * job.num_candidates + candidate];
  job.selected[int64_t{r} * (job.num_nodes - 1) + node - 1] = candidate;
}

/// The parents of what is selected.
struct DraftParentsJob {
  const int64_t* parent_list = nullptr;
  int64_t num_extensions = 0;  ///< of a request
  const int64_t* selected = nullptr;
  int64_t num_candidates = 0;
  int32_t topk = 1;
  int32_t num_requests = 0;
  int32_t num_nodes = 1;
  int32_t* parents = nullptr;
};

/// Writes a node's parent. One that hangs off nothing is reported, and hangs off the root.
template <typename Report>
FOLIO_HOST_DEVICE constexpr void write_parent(const DraftParentsJob& job, int32_t r, int32_t node, Report&& report) {
  int32_t* const parents = job.parents + int64_t{r} * job.num_nodes;
  if (node == 0) {
    parents[0] = -1;
    return;
  }
  const int64_t* const list = job.parent_list + r * job.num_extensions;
  const int64_t* const selected = job.selected + int64_t{r} * (job.num_nodes - 1);
  const ListReport found = selection_fault(list, job.num_extensions, selected, job.num_candidates, job.topk, r, node);
  if (found.fault != KvRangeFault::kNone) report(found);
  const bool hangs = found.fault == KvRangeFault::kNone;
  parents[node] = hangs ? parent_node(list, job.num_extensions, selected, job.topk, node) : 0;
}

/// Where nodes stand, and their links; what is null is not written.
struct DraftNodesJob {
  const int32_t* parents = nullptr;
  const int32_t* seq_lens = nullptr;
  int32_t num_requests = 0;
  int32_t num_nodes = 1;
  int32_t* positions = nullptr;
  int32_t* retrieve_index = nullptr;
  int32_t* next_token = nullptr;
  int32_t* next_sibling = nullptr;
};

template <typename Report>
FOLIO_HOST_DEVICE constexpr void write_node(const DraftNodesJob& job, int32_t r, int32_t node, Report&& report) {
  const int64_t root = int64_t{r} * job.num_nodes;
  const int32_t* const parents = job.parents + root;
  const ListReport found = parent_fault(parents, r, node);
  if (found.fault != KvRangeFault::kNone) report(found);
  if (job.positions != nullptr) {
    const int32_t seq_len = job.seq_lens[r];
    const bool fits = seq_len >= 0 && seq_len <= INT32_MAX - job.num_nodes;
    if (!fits && node == 0) report(ListReport{0, KvRangeFault::kLength, r, 0, seq_len, 0});
    job.positions[root + node] = (fits ? seq_len : 0) + depth_of(parents, node);
  }
  if (job.next_token == nullptr) return;
  job.retrieve_index[root + node] = static_cast<int32_t>(root + node);
  job.next_token[root + node] = next_child(parents, job.num_nodes, node, node);
  job.next_sibling[root + node] = node == 0 ? -1 : next_child(parents, job.num_nodes, parent_of(parents, node), node);
}

}  // namespace folio::inline v0::backends::token_pool
