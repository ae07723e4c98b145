#include "folio/backends/token_pool/draft_tree.hpp"

#include <algorithm>
#include <cmath>

#include "backends/token_pool/device/draft_tree_rule.hpp"
#include "backends/token_pool/draft_tree_checks.hpp"
#include "backends/token_pool/gpu.hpp"
#include "backends/token_pool/request_table.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::checked_add;
using core::checked_mul;
using core::kMaxInt32;
using core::require;
using token_pool::check_parents;

void check_shape(const DraftTreeShape& shape) {
  require(shape.topk >= 1 && shape.spec_steps >= 1 && shape.draft_token_num >= 1, "topk is ", shape.topk,
          ", spec_steps ", shape.spec_steps, ", draft_token_num ", shape.draft_token_num, "; each must be at least 1");
}

void check_size(const char* name, size_t size, int64_t num_requests, int64_t per_request) {
  require(static_cast<int64_t>(size) == checked_mul(num_requests, per_request), name, " has ", size, " entries for ",
          num_requests, " requests of ", per_request);
}

/// Keeps the `count` best of the scores, in order of score; of equal ones those that come first.
void keep_best(const float* scores, int64_t num_scores, int64_t count, int64_t* best) {
  int64_t kept = 0;
  for (int64_t c = 0; c < num_scores; ++c) {
    if (kept == count && (count == 0 || !(scores[c] > scores[best[count - 1]]))) continue;
    int64_t place = kept < count ? kept++ : count - 1;
    for (; place > 0 && scores[c] > scores[best[place - 1]]; --place) best[place] = best[place - 1];
    best[place] = c;
  }
}

void check_selection(const int64_t* selected, int64_t count, int64_t num_candidates, size_t request) {
  for (int64_t i = 0; i < count; ++i) {
    require(selected[i] >= 0 && selected[i] < num_candidates, "request ", request, " selects candidate ", selected[i],
            "; there are ", num_candidates);
    require(i == 0 || selected[i - 1] < selected[i], "request ", request, " selects candidate ", selected[i], " after ",
            selected[i - 1], "; they must ascend");
  }
}

}  // namespace

int64_t draft_candidates(const DraftTreeShape& shape) {
  check_shape(shape);
  const int64_t topk = shape.topk;
  const int64_t count = checked_add(topk, checked_mul(int64_t{shape.spec_steps} - 1, topk, topk));
  require(count <= kMaxInt32, count, " candidates; up to ", kMaxInt32, " are offered");
  return count;
}

int64_t draft_parent_list_len(const DraftTreeShape& shape) {
  draft_candidates(shape);
  return shape.spec_steps == 1 ? 0 : int64_t{shape.topk} * (shape.spec_steps - 1) + 1;
}

namespace {

void check_selection_sizes(std::span<const float> scores, std::span<const int64_t> tokens,
                           std::span<const int64_t> bonus_tokens, const DraftTreeShape& shape,
                           std::span<const int64_t> selected_index, std::span<const int64_t> draft_tokens) {
  const int64_t candidates = draft_candidates(shape);
  const int64_t nodes = shape.draft_token_num, count = nodes - 1;
  const auto num_requests = static_cast<int64_t>(bonus_tokens.size());
  require(count <= candidates, "draft_token_num is ", nodes, "; the draft has ", candidates,
          " candidates beside the root");
  check_size("scores", scores.size(), num_requests, candidates);
  check_size("tokens", tokens.size(), num_requests, candidates);
  check_size("selected_index", selected_index.size(), num_requests, count);
  check_size("draft_tokens", draft_tokens.size(), num_requests, nodes);
}

/// Returns the number of requests.
int32_t check_parent_sizes(std::span<const int64_t> parent_list, std::span<const int64_t> selected_index,
                           const DraftTreeShape& shape, std::span<const int32_t> parents) {
  const int64_t extensions = draft_parent_list_len(shape);
  const int64_t num_requests =
      token_pool::requests_of("parents", static_cast<int64_t>(parents.size()), shape.draft_token_num);
  check_size("parent_list", parent_list.size(), num_requests, extensions);
  check_size("selected_index", selected_index.size(), num_requests, int64_t{shape.draft_token_num} - 1);
  return core::checked_cast<int32_t>(num_requests);
}

/// Nodes of a request; 1 where there is none.
int32_t nodes_of(std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                 std::span<const int32_t> positions) {
  require(positions.size() == parents.size(), "positions has ", positions.size(), " entries, parents ", parents.size());
  if (seq_lens.empty()) {
    require(parents.empty(), "parents has ", parents.size(), " entries for no requests");
    return 1;
  }
  require(parents.size() % seq_lens.size() == 0, "parents has ", parents.size(), " entries for ", seq_lens.size(),
          " requests; each has as many");
  return core::checked_cast<int32_t>(parents.size() / seq_lens.size());
}

void check_link_sizes(int64_t num_requests, int32_t draft_token_num, std::span<const int32_t> retrieve_index,
                      std::span<const int32_t> next_token, std::span<const int32_t> next_sibling) {
  check_size("retrieve_index", retrieve_index.size(), num_requests, draft_token_num);
  check_size("next_token", next_token.size(), num_requests, draft_token_num);
  check_size("next_sibling", next_sibling.size(), num_requests, draft_token_num);
  const int64_t nodes = num_requests * draft_token_num;
  require(nodes <= kMaxInt32, "parents has ", nodes, " entries; up to ", kMaxInt32, " are offered");
}

}  // namespace

void select_draft_tokens(std::span<const float> scores, std::span<const int64_t> tokens,
                         std::span<const int64_t> bonus_tokens, const DraftTreeShape& shape,
                         std::span<int64_t> selected_index, std::span<int64_t> draft_tokens) {
  check_selection_sizes(scores, tokens, bonus_tokens, shape, selected_index, draft_tokens);
  const int64_t candidates = draft_candidates(shape);
  const int64_t nodes = shape.draft_token_num, count = nodes - 1;
  const auto num_requests = static_cast<int64_t>(bonus_tokens.size());
  for (size_t i = 0; i < scores.size(); ++i) {
    const auto place = static_cast<int64_t>(i);
    require(!std::isnan(scores[i]), "request ", place / candidates, " has a NaN as the score of candidate ",
            place % candidates);
  }
  for (int64_t r = 0; r < num_requests; ++r) {
    int64_t* const selected = selected_index.data() + r * count;
    keep_best(scores.data() + r * candidates, candidates, count, selected);
    std::sort(selected, selected + count);
    int64_t* const out = draft_tokens.data() + r * nodes;
    out[0] = bonus_tokens[static_cast<size_t>(r)];
    for (int64_t i = 0; i < count; ++i) out[i + 1] = tokens[static_cast<size_t>(r * candidates + selected[i])];
  }
}

void draft_tree_parents(std::span<const int64_t> parent_list, std::span<const int64_t> selected_index,
                        const DraftTreeShape& shape, std::span<int32_t> parents) {
  const int64_t candidates = draft_candidates(shape), extensions = draft_parent_list_len(shape);
  const int64_t count = int64_t{shape.draft_token_num} - 1;
  const int64_t num_requests = check_parent_sizes(parent_list, selected_index, shape, parents);
  const auto parent_of = [&](int64_t r, int32_t node) {
    return token_pool::parent_node(parent_list.data() + r * extensions, extensions, selected_index.data() + r * count,
                                   shape.topk, node);
  };
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t* const selected = selected_index.data() + r * count;
    check_selection(selected, count, candidates, static_cast<size_t>(r));
    for (int32_t node = 1; node <= count; ++node) {
      require(parent_of(r, node) != token_pool::kNoParent, "request ", r, " selects candidate ", selected[node - 1],
              " as node ", node, ", but not its parent before it");
    }
  }
  for (int64_t r = 0; r < num_requests; ++r) {
    int32_t* const out = parents.data() + r * (count + 1);
    out[0] = -1;
    for (int32_t node = 1; node <= count; ++node) out[node] = parent_of(r, node);
  }
}

void draft_tree_positions(std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                          std::span<int32_t> positions) {
  const int32_t nodes = nodes_of(parents, seq_lens, positions);
  if (seq_lens.empty()) return;
  check_parents(parents, nodes);
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    require(seq_lens[r] >= 0 && seq_lens[r] <= kMaxInt32 - nodes, "request ", r, " has length ", seq_lens[r],
            "; it must be in [0, ", kMaxInt32 - nodes, "]");
  }
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    const size_t root = r * static_cast<size_t>(nodes);
    positions[root] = seq_lens[r];
    for (size_t i = root + 1; i < root + static_cast<size_t>(nodes); ++i) {
      positions[i] = positions[root + static_cast<size_t>(parents[i])] + 1;
    }
  }
}

void draft_tree_links(std::span<const int32_t> parents, int32_t draft_token_num, std::span<int32_t> retrieve_index,
                      std::span<int32_t> next_token, std::span<int32_t> next_sibling) {
  const int64_t num_requests = check_parents(parents, draft_token_num);
  check_link_sizes(num_requests, draft_token_num, retrieve_index, next_token, next_sibling);
  std::ranges::fill(next_token, -1);
  std::ranges::fill(next_sibling, -1);
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t root = r * draft_token_num;
    int32_t* const first_child = next_token.data() + root;
    // From the last node to the first, so that each becomes the first of its parent's children.
    for (int32_t node = draft_token_num - 1; node >= 0; --node) {
      retrieve_index[static_cast<size_t>(root + node)] = static_cast<int32_t>(root + node);
      if (node == 0) break;
      int32_t& child = first_child[parents[static_cast<size_t>(root + node)]];
      next_sibling[static_cast<size_t>(root + node)] = child;
      child = node;
    }
  }
}

void select_draft_tokens(std::span<const float> scores, std::span<const int64_t> tokens,
                         std::span<const int64_t> bonus_tokens, const DraftTreeShape& shape,
                         std::span<int64_t> selected_index, std::span<int64_t> draft_tokens, DeviceFaults& faults,
                         Stream stream) {
  if (faults.device().type == DeviceType::kCpu) {
    select_draft_tokens(scores, tokens, bonus_tokens, shape, selected_index, draft_tokens);
    return;
  }
  check_selection_sizes(scores, tokens, bonus_tokens, shape, selected_index, draft_tokens);
  token_pool::DraftSelectionJob job;
  job.scores = scores.data();
  job.tokens = tokens.data();
  job.bonus_tokens = bonus_tokens.data();
  job.num_requests = core::checked_cast<int32_t>(bonus_tokens.size());
  job.num_candidates = static_cast<int32_t>(draft_candidates(shape));
  job.num_nodes = shape.draft_token_num;
  job.selected = selected_index.data();
  job.draft_tokens = draft_tokens.data();
  token_pool::gpu::select_draft_tokens(faults.device().index, job, faults.report(), stream);
}

void draft_tree_parents(std::span<const int64_t> parent_list, std::span<const int64_t> selected_index,
                        const DraftTreeShape& shape, std::span<int32_t> parents, DeviceFaults& faults, Stream stream) {
  if (faults.device().type == DeviceType::kCpu) {
    draft_tree_parents(parent_list, selected_index, shape, parents);
    return;
  }
  token_pool::DraftParentsJob job;
  job.num_requests = check_parent_sizes(parent_list, selected_index, shape, parents);
  job.parent_list = parent_list.data();
  job.num_extensions = draft_parent_list_len(shape);
  job.selected = selected_index.data();
  job.num_candidates = draft_candidates(shape);
  job.topk = shape.topk;
  job.num_nodes = shape.draft_token_num;
  job.parents = parents.data();
  token_pool::gpu::write_parents(faults.device().index, job, faults.report(), stream);
}

void draft_tree_positions(std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                          std::span<int32_t> positions, DeviceFaults& faults, Stream stream) {
  if (faults.device().type == DeviceType::kCpu) {
    draft_tree_positions(parents, seq_lens, positions);
    return;
  }
  token_pool::DraftNodesJob job;
  job.num_nodes = nodes_of(parents, seq_lens, positions);
  token_pool::requests_of("parents", static_cast<int64_t>(parents.size()), job.num_nodes);
  job.parents = parents.data();
  job.seq_lens = seq_lens.data();
  job.num_requests = core::checked_cast<int32_t>(seq_lens.size());
  job.positions = positions.data();
  token_pool::gpu::write_nodes(faults.device().index, job, faults.report(), stream);
}

void draft_tree_links(std::span<const int32_t> parents, int32_t draft_token_num, std::span<int32_t> retrieve_index,
                      std::span<int32_t> next_token, std::span<int32_t> next_sibling, DeviceFaults& faults,
                      Stream stream) {
  if (faults.device().type == DeviceType::kCpu) {
    draft_tree_links(parents, draft_token_num, retrieve_index, next_token, next_sibling);
    return;
  }
  const int64_t num_requests =
      token_pool::requests_of("parents", static_cast<int64_t>(parents.size()), draft_token_num);
  check_link_sizes(num_requests, draft_token_num, retrieve_index, next_token, next_sibling);
  token_pool::DraftNodesJob job;
  job.parents = parents.data();
  job.num_requests = static_cast<int32_t>(num_requests);
  job.num_nodes = draft_token_num;
  job.retrieve_index = retrieve_index.data();
  job.next_token = next_token.data();
  job.next_sibling = next_sibling.data();
  token_pool::gpu::write_nodes(faults.device().index, job, faults.report(), stream);
}

}  // namespace folio::inline v0::backends
