#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/backends/batch_order.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_cases;
using folio::testing::GoldenCase;

/// A batch with these query lengths; seq_lens as long as the queries unless given.
struct TestBatch {
  std::vector<int32_t> query_start_loc{0};
  std::vector<int32_t> seq_lens;
  CommonAttentionMetadata view;

  explicit TestBatch(const std::vector<int32_t>& query_lens, const std::vector<int32_t>& lens = {}) {
    for (int32_t len : query_lens) {
      query_start_loc.push_back(query_start_loc.back() + len);
      view.max_query_len = std::max(view.max_query_len, len);
    }
    seq_lens = lens.empty() ? query_lens : lens;
    view.query_start_loc = query_start_loc;
    view.seq_lens = seq_lens;
    view.num_reqs = static_cast<int32_t>(query_lens.size());
    view.num_actual_tokens = query_start_loc.back();
  }
};

class SplitTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(SplitTable, Divides) {
  TestBatch batch(GetParam().ints("query_lens"));
  batch.view.num_actual_tokens = GetParam().at<int32_t>("num_tokens");
  const BatchSplit split = split_decodes_and_prefills(batch.view, GetParam().at<int32_t>("threshold"),
                                                      GetParam().at<bool>("require_uniform"));
  EXPECT_EQ((std::vector{split.num_decodes, split.num_prefills, split.num_decode_tokens, split.num_prefill_tokens}),
            GetParam().ints("expected"));
}

INSTANTIATE_TEST_SUITE_P(Golden, SplitTable, ::testing::ValuesIn(golden_cases("backends/batch_split", "splits")),
                         folio::testing::golden_case_name);

class ExtendTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(ExtendTable, DividesIntoThree) {
  TestBatch batch(GetParam().ints("query_lens"), GetParam().ints("seq_lens"));
  batch.view.num_actual_tokens = GetParam().value("num_tokens", batch.view.num_actual_tokens);
  const ExtendSplit split = split_decodes_prefills_and_extends(batch.view, GetParam().at<int32_t>("threshold"));
  EXPECT_EQ((std::vector{split.num_decodes, split.num_extends, split.num_prefills, split.num_decode_tokens,
                         split.num_extend_tokens, split.num_prefill_tokens}),
            GetParam().ints("expected"));
}

INSTANTIATE_TEST_SUITE_P(Golden, ExtendTable, ::testing::ValuesIn(golden_cases("backends/batch_split", "extends")),
                         folio::testing::golden_case_name);

TEST(SplitDecodesAndPrefills, RefusesUniformRequestsWithoutTheirTokens) {
  TestBatch batch({2, 2, 0});
  try {
    split_decodes_and_prefills(batch.view, 3, true);
    FAIL() << "4 tokens are not 3 requests of 2";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("tokens not padded correctly"), std::string::npos);
  }
}

TEST(SplitDecodesAndPrefills, RefusesAShortQueryStartLoc) {
  TestBatch batch({2, 2});
  batch.view.num_reqs = 3;
  EXPECT_THROW(split_decodes_and_prefills(batch.view), Error);
}

TEST(SplitDecodesAndPrefills, PlansFromTheHostCopyOfDeviceArrays) {
  TestBatch batch({1, 4});
  batch.view.where = Where::kDevice;
  EXPECT_THROW(split_decodes_and_prefills(batch.view), Error);
  batch.view.query_start_loc_host = batch.view.query_start_loc;
  EXPECT_EQ(split_decodes_and_prefills(batch.view), (BatchSplit{1, 1, 1, 4}));
}

}  // namespace
}  // namespace folio::inline v0::backends
