#include <gtest/gtest.h>

#include <vector>

#include "core/allocation_test_util.hpp"
#include "folio/backends/token_pool/draft_kv_indices.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"
#include "folio/backends/token_pool/kv_indices.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::backends {
namespace {

using Ints = std::vector<int32_t>;

TEST(TokenPoolListsTest, AllocateNothing) {
  const Ints table(64), rows = {1, 0}, lens = {5, 1};
  const PageTableView req_to_token = dense_table(table, 2, 32);
  const DraftBranches branches{2, 2, 1};
  const DraftTreeShape shape{2, 2, 4};
  const std::vector<float> scores = {.5f, .4f, .3f, .2f, .1f, .0f};
  const std::vector<int64_t> tokens(6), bonus(1), parent_list = {-1, 0, 1};
  std::vector<int64_t> selected(3), drafts(4);
  Ints list_lens(2), starts(2), indptr(3), indices(6), draft_indptr(10), draft_indices(2 * 20);
  Ints parents(4), positions(4), index(4), next_token(4), next_sibling(4);
  const std::span<const int32_t> one_len(lens.data(), 1);
  std::vector<uint8_t> mask(static_cast<size_t>(tree_mask_bytes(TreeMaskForm::kFullMask, one_len, 4)));

  const int64_t before = folio::testing::num_allocations();
  window_kv_ranges(lens, {}, 2, 1, list_lens, starts);
  window_prefix_ranges(lens, 2, 1, list_lens, starts);
  kv_indptr_from_lens(list_lens, 1, indptr);
  create_kv_indices({req_to_token, rows, list_lens, indptr, starts, 1, 64}, indices);
  generate_draft_decode_kv_indices({req_to_token, rows, lens, {}, branches, 2, 64},
                                   {draft_indptr, 5, draft_indices, 20});
  select_draft_tokens(scores, tokens, bonus, shape, selected, drafts);
  draft_tree_parents(parent_list, selected, shape, parents);
  draft_tree_positions(parents, one_len, positions);
  draft_tree_links(parents, 4, index, next_token, next_sibling);
  for (int32_t form = 0; form < 5; ++form) {
    fill_tree_mask(static_cast<TreeMaskForm>(form), parents, one_len, 4, mask);
  }
  EXPECT_EQ(folio::testing::num_allocations(), before);
  EXPECT_EQ(draft_indptr[9], 20);
  EXPECT_EQ(positions, (Ints{5, 6, 6, 7}));
}

}  // namespace
}  // namespace folio::inline v0::backends
