#include "folio/backends/attention_metadata.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "core/golden_test.hpp"
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

TEST(SliceQueryStartLocs, GoldenCases) {
  for (const folio::testing::GoldenCase& c : folio::testing::golden_cases("backends/batch_slice")) {
    const std::vector<int32_t> expected = c.ints("expected");
    std::vector<int32_t> start_loc(expected.size(), -7);
    slice_query_start_locs(c.ints("query_start_loc"), c.at<int32_t>("begin"), c.at<int32_t>("end"), start_loc);
    EXPECT_EQ(start_loc, expected) << c.data;
  }
}

TEST(SliceQueryStartLocs, Refuses) {
  const std::vector<int32_t> starts{0, 5, 12};
  std::vector<int32_t> two(2);
  EXPECT_NO_THROW(slice_query_start_locs(starts, 1, 2, two));
  EXPECT_THROW(slice_query_start_locs(starts, 1, 3, two), Error);
  EXPECT_THROW(slice_query_start_locs(starts, -1, 0, two), Error);
  EXPECT_THROW(slice_query_start_locs(starts, 2, 1, two), Error);
  EXPECT_THROW(slice_query_start_locs(starts, 0, 2, two), Error);
}

struct SlicedBatch {
  std::vector<int32_t> starts{0, 1, 2, 9, 12};
  std::vector<int32_t> seq_lens{90, 8, 70, 3};
  std::vector<int64_t> slots{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  std::vector<uint8_t> flags{0, 1, 1, 0};
  std::vector<int32_t> table = std::vector<int32_t>(4 * 6);
  CommonAttentionMetadata batch;

  SlicedBatch() {
    batch.query_start_loc = batch.query_start_loc_host = starts;
    batch.seq_lens = batch.seq_lens_host = batch.seq_lens_host_upper_bound = seq_lens;
    batch.slot_mapping = batch.positions = slots;
    batch.is_prefilling = batch.causal_per_request = flags;
    batch.num_reqs = 4;
    batch.num_actual_tokens = 14;  // two tokens of padding
    batch.max_query_len = 7;
    batch.max_seq_len = 90;
    batch.block_table = {table.data(), 4, 5, 6};
  }
};

TEST(CommonAttentionMetadataTest, SlicesAreBatchesOfTheirOwn) {
  const SlicedBatch whole;
  EXPECT_EQ(whole.batch.batch_size(), 4);
  std::vector<int32_t> starts(3);
  const CommonAttentionMetadata middle = whole.batch.slice(1, 3, starts);
  EXPECT_EQ(middle.num_reqs, 2);
  EXPECT_EQ(middle.num_actual_tokens, 8);
  EXPECT_EQ(starts, (std::vector<int32_t>{0, 1, 8}));
  EXPECT_EQ(middle.query_start_loc.data(), starts.data());
  EXPECT_EQ(middle.query_start_loc_host.data(), starts.data());
  EXPECT_EQ(middle.seq_lens.data(), whole.seq_lens.data() + 1);
  EXPECT_EQ(middle.seq_lens.size(), 2u);
  EXPECT_EQ(middle.seq_lens_host_upper_bound.size(), 2u);
  EXPECT_EQ(middle.is_prefilling.data(), whole.flags.data() + 1);
  EXPECT_EQ(middle.causal_per_request.size(), 2u);
  EXPECT_EQ(middle.slot_mapping.data(), whole.slots.data() + 1);
  EXPECT_EQ(middle.slot_mapping.size(), 8u);
  EXPECT_EQ(middle.positions.size(), 8u);
  EXPECT_EQ(middle.block_table.data, whole.table.data() + 6);
  EXPECT_EQ(middle.block_table.num_rows, 2);
  EXPECT_EQ(middle.max_query_len, 7);
  EXPECT_EQ(middle.max_seq_len, 70);
}

// With the whole batch's longest query, a slice of decodes would be taken for one that may hold prefills.
TEST(CommonAttentionMetadataTest, SlicesHaveTheirOwnMaxima) {
  const SlicedBatch whole;
  std::vector<int32_t> starts(3);
  const CommonAttentionMetadata decodes = whole.batch.slice(0, 2, starts);
  EXPECT_EQ(decodes.max_query_len, 1);
  EXPECT_EQ(decodes.max_seq_len, 90);
  EXPECT_EQ(decodes.num_actual_tokens, 2);
}

TEST(CommonAttentionMetadataTest, PaddingBelongsToTheLastSlice) {
  const SlicedBatch whole;
  std::vector<int32_t> starts(2);
  const CommonAttentionMetadata last = whole.batch.slice(3, 4, starts);
  EXPECT_EQ(last.num_actual_tokens, 5) << "three tokens and two of padding";
  EXPECT_EQ(last.slot_mapping.size(), 3u) << "padding has no slots";
  std::vector<int32_t> one(1);
  EXPECT_EQ(whole.batch.slice(2, 2, one).num_actual_tokens, 0);
  EXPECT_EQ(whole.batch.slice(2, 2, one).max_seq_len, 0);
}

TEST(CommonAttentionMetadataTest, RefusesSlicesThatItCannotMake) {
  SlicedBatch whole;
  std::vector<int32_t> starts(3);
  EXPECT_THROW(whole.batch.slice(3, 5, starts), Error);
  EXPECT_THROW(whole.batch.slice(0, 3, starts), Error);
  const std::vector<int32_t> indices{1};
  const std::vector<BidirectionalRange> ranges{{1, 0, 1}};
  const auto unsupported = [&](const CommonAttentionMetadata& batch) {
    try {
      batch.slice(0, 2, starts);
      ADD_FAILURE() << "sliced";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    }
  };
  CommonAttentionMetadata batch = whole.batch;
  batch.logits_indices_padded = indices;
  unsupported(batch);
  batch = whole.batch;
  batch.mm_req_doc_ranges = ranges;
  unsupported(batch);
  batch = whole.batch;
  batch.where = Where::kDevice;
  unsupported(batch);
}

TEST(CommonAttentionMetadataTest, UnpaddedKeepsTheRangesOfItsRequests) {
  SlicedBatch whole;
  const std::vector<BidirectionalRange> ranges{{0, 1, 4}, {1, 0, 1}, {1, 3, 4}, {3, 0, 2}};
  whole.batch.mm_req_doc_ranges = ranges;
  const CommonAttentionMetadata cut = whole.batch.unpadded(9, 2);
  EXPECT_EQ(cut.mm_req_doc_ranges.size(), 3u);
  EXPECT_EQ(cut.causal_per_request.size(), 2u);
  EXPECT_EQ(cut.seq_lens_host_upper_bound.size(), 2u);
}

}  // namespace
}  // namespace folio::inline v0::backends
