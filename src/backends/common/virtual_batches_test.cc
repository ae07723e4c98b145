#include "folio/backends/virtual_batches.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;

/// A batch with the page ids 0, 1, 2, ... row after row.
struct Batch {
  Batch(const std::vector<int32_t>& query_lens, std::vector<int32_t> keys, int32_t columns)
      : seq_lens(std::move(keys)), table(seq_lens.size() * static_cast<size_t>(columns)) {
    for (int32_t len : query_lens) query_start_loc.push_back(query_start_loc.back() + len);
    std::iota(table.begin(), table.end(), 0);
    slots.assign(static_cast<size_t>(query_start_loc.back()), 7);
    view.query_start_loc = query_start_loc;
    view.seq_lens = seq_lens;
    view.num_reqs = static_cast<int32_t>(seq_lens.size());
    view.num_actual_tokens = query_start_loc.back();
    view.max_query_len = *std::ranges::max_element(query_lens);
    view.max_seq_len = *std::ranges::max_element(seq_lens);
    view.block_table = {table.data(), view.num_reqs, columns, columns};
    view.slot_mapping = slots;
  }
  std::vector<int32_t> query_start_loc{0}, seq_lens, table;
  std::vector<int64_t> slots;
  CommonAttentionMetadata view;
};

std::vector<int32_t> copy(std::span<const int32_t> values) {
  return {values.begin(), values.end()};
}

class LocalAttention : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(LocalAttention, Golden) {
  const auto& golden = GetParam();
  const auto& expected = golden.data["expected"];
  Batch batch(golden.ints("query_lens"), golden.ints("seq_lens"), golden.at<int32_t>("columns"));
  batch.view.causal = false;
  VirtualBatchStorage storage;
  const CommonAttentionMetadata local = make_local_attention_virtual_batches(golden.at<int32_t>("chunk"), batch.view,
                                                                             golden.at<int32_t>("page_size"), storage);
  EXPECT_EQ(copy(local.query_start_loc), expected["query_start_loc"].get<std::vector<int32_t>>());
  EXPECT_EQ(copy(local.seq_lens), expected["seq_lens"].get<std::vector<int32_t>>());
  EXPECT_EQ(local.num_reqs, static_cast<int32_t>(local.seq_lens.size()));
  const BlockTableView& table = local.block_table;
  EXPECT_EQ(table.num_columns, golden.at<int32_t>("chunk") / golden.at<int32_t>("page_size"));
  EXPECT_EQ(std::vector<int32_t>(table.data, table.data + table.num_rows * table.row_stride),
            expected["block_table"].get<std::vector<int32_t>>());
  EXPECT_EQ(local.max_query_len, expected["max_query_len"]);
  EXPECT_EQ(local.max_seq_len, expected["max_seq_len"]);
  EXPECT_EQ(local.num_actual_tokens, batch.view.num_actual_tokens);
  EXPECT_EQ(local.slot_mapping.data(), batch.slots.data());
  EXPECT_TRUE(local.causal);
}

INSTANTIATE_TEST_SUITE_P(Cases, LocalAttention,
                         ::testing::ValuesIn(golden_cases("backends/virtual_batches", "local_attention")),
                         golden_case_name);

TEST(LocalAttentionErrors, AreNamed) {
  Batch batch({2}, {6}, 3);
  VirtualBatchStorage storage;
  EXPECT_THROW(
      {
        try {
          make_local_attention_virtual_batches(5, batch.view, 2, storage);
        } catch (const Error& error) {
          EXPECT_STREQ(error.what(), "attn_chunk_size 5 is not divisible by block_size 2");
          throw;
        }
      },
      Error);
  EXPECT_THROW(make_local_attention_virtual_batches(4, batch.view, 1, storage), Error) << "the table is too narrow";
  batch.seq_lens[0] = 1;
  EXPECT_THROW(make_local_attention_virtual_batches(4, batch.view, 2, storage), Error) << "more queries than keys";
}

class FastPrefill : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(FastPrefill, Golden) {
  const auto& golden = GetParam();
  const auto& expected = golden.data["expected"];
  Batch batch(golden.ints("query_lens"), golden.ints("seq_lens"), 10);
  const std::vector<int32_t> indices = golden.ints("logits_indices");
  batch.view.logits_indices_padded = indices;
  batch.view.num_logits_indices = golden.at<int32_t>("count");
  VirtualBatchStorage storage;
  const CommonAttentionMetadata fast = make_kv_sharing_fast_prefill_common_attn_metadata(batch.view, storage);
  EXPECT_EQ(copy(fast.query_start_loc), expected["query_start_loc"].get<std::vector<int32_t>>());
  EXPECT_EQ(fast.num_actual_tokens, expected["num_actual_tokens"]);
  EXPECT_EQ(fast.max_query_len, expected["max_query_len"]);
  EXPECT_EQ(copy(fast.seq_lens), batch.seq_lens);
  EXPECT_EQ(fast.block_table.data, batch.table.data());
  EXPECT_TRUE(fast.logits_indices_padded.empty());
}

INSTANTIATE_TEST_SUITE_P(Cases, FastPrefill,
                         ::testing::ValuesIn(golden_cases("backends/virtual_batches", "fast_prefill")),
                         golden_case_name);

TEST(FastPrefillErrors, RefusesTokensThatAreNotARequestsLast) {
  Batch batch({3, 4}, {3, 9}, 5);
  VirtualBatchStorage storage;
  for (const std::vector<int32_t>& indices : std::vector<std::vector<int32_t>>{{1, 6}, {0, 2, 6}, {2, 7}, {6, 2}}) {
    batch.view.logits_indices_padded = indices;
    batch.view.num_logits_indices = static_cast<int32_t>(indices.size());
    EXPECT_THROW(make_kv_sharing_fast_prefill_common_attn_metadata(batch.view, storage), Error) << indices[0];
  }
  const std::vector<int32_t> one{2};
  batch.view.logits_indices_padded = one;
  batch.view.num_logits_indices = 2;
  EXPECT_THROW(make_kv_sharing_fast_prefill_common_attn_metadata(batch.view, storage), Error);
}

}  // namespace
}  // namespace folio::inline v0::backends
