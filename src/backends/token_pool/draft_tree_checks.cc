#include "backends/token_pool/draft_tree_checks.hpp"

#include "core/error.hpp"

namespace folio::inline v0::backends::token_pool {

using core::require;

int64_t requests_of(const char* name, int64_t size, int32_t draft_token_num) {
  require(draft_token_num >= 1, "draft_token_num is ", draft_token_num, "; it must be at least 1");
  require(size % draft_token_num == 0, name, " has ", size, " entries; requests have ", draft_token_num, " each");
  return size / draft_token_num;
}

int64_t check_parents(std::span<const int32_t> parents, int32_t draft_token_num) {
  const int64_t num_requests = requests_of("parents", static_cast<int64_t>(parents.size()), draft_token_num);
  for (int64_t r = 0; r < num_requests; ++r) {
    const int32_t* const tree = parents.data() + r * draft_token_num;
    require(tree[0] == -1, "request ", r, " has a root with parent ", tree[0], "; it must be -1");
    for (int32_t node = 1; node < draft_token_num; ++node) {
      require(tree[node] >= 0 && tree[node] < node, "node ", node, " of request ", r, " has parent ", tree[node],
              "; it must be a node before it");
    }
  }
  return num_requests;
}

}  // namespace folio::inline v0::backends::token_pool
