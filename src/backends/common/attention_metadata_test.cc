#include "folio/backends/attention_metadata.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

TEST(BlockTable, BecomesADensePageTableOverTheSameMemory) {
  const std::vector<int32_t> entries(40);
  const BlockTableView table{entries.data(), 4, 8, 10};
  const PageTableView view = to_page_table(table, 3);
  EXPECT_EQ(view.kind, PageTableKind::kDense);
  EXPECT_EQ(view.indices, entries.data());
  EXPECT_EQ(view.row_stride, 10);
  EXPECT_EQ(view.num_rows, 3);
  EXPECT_EQ(view.num_indices, 28) << "the last row's gap is not addressable";
  EXPECT_EQ(to_page_table(table, 0).num_indices, 0);
}

TEST(CommonAttentionMetadataTest, UnpaddedCutsEveryArrayAndKeepsTheMaxima) {
  const std::vector<int32_t> starts{0, 2, 5, 5, 5};
  const std::vector<int32_t> seq_lens{9, 7, 0, 0};
  const std::vector<int64_t> slots{1, 2, 3, 4, 5, -1, -1, -1};
  CommonAttentionMetadata batch;
  batch.query_start_loc = starts;
  batch.seq_lens = seq_lens;
  batch.slot_mapping = slots;
  batch.positions = slots;
  batch.num_reqs = 4;
  batch.num_actual_tokens = 8;
  batch.max_query_len = 3;
  batch.max_seq_len = 9;
  batch.block_table.num_rows = 4;
  const CommonAttentionMetadata cut = batch.unpadded(5, 2);
  EXPECT_EQ(cut.num_reqs, 2);
  EXPECT_EQ(cut.num_actual_tokens, 5);
  EXPECT_EQ(cut.query_start_loc.size(), 3u);
  EXPECT_EQ(cut.seq_lens.size(), 2u);
  EXPECT_EQ(cut.slot_mapping.size(), 5u);
  EXPECT_EQ(cut.positions.size(), 5u);
  EXPECT_EQ(cut.encoder_seq_lens.size(), 0u);
  EXPECT_EQ(cut.block_table.num_rows, 2);
  EXPECT_EQ(cut.max_query_len, 3);
  EXPECT_EQ(cut.max_seq_len, 9);
  EXPECT_EQ(cut.query_len(1), 3);
  EXPECT_EQ(cut.num_computed_tokens(1), 4);
  EXPECT_THROW(batch.unpadded(9, 2), Error);
  EXPECT_THROW(batch.unpadded(5, 5), Error);
}

}  // namespace
}  // namespace folio::inline v0::backends
