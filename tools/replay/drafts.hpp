#pragma once

#include <cstdint>
#include <vector>

namespace folio::replay {

/// Speculative decoding with a made-up draft model. Drafts are a tree of `tokens` nodes, of which each has `topk`
/// children: node 0 is the last generated token, node i > 0 a child of node (i - 1) / topk.
struct DraftOptions {
  int32_t tokens = 0;  ///< nodes, the root included; 0 = no drafts
  int32_t topk = 1;
  uint64_t seed = 1;

  int32_t parent(int32_t node) const { return node == 0 ? -1 : (node - 1) / topk; }
};

/// The nodes that hold the tokens that the request really has at `position` (the root's) and behind it, at most `limit`
/// of them, the root included. Where a draft goes wrong depends on the seed, request and position alone.
void true_path(const DraftOptions& drafts, int32_t request, int32_t position, int32_t limit,
               std::vector<int32_t>& nodes);

}  // namespace folio::replay
