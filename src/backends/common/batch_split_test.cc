#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "folio/backends/batch_order.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::TestWithParam;
using testing::ValuesIn;

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

struct SplitCase {
  std::vector<int32_t> query_lens;
  int32_t threshold;
  bool require_uniform;
  int32_t num_tokens;  ///< with padding
  BatchSplit expected;
};

class SplitTable : public TestWithParam<SplitCase> {};

TEST_P(SplitTable, Divides) {
  TestBatch batch(GetParam().query_lens);
  batch.view.num_actual_tokens = GetParam().num_tokens;
  EXPECT_EQ(split_decodes_and_prefills(batch.view, GetParam().threshold, GetParam().require_uniform),
            GetParam().expected);
}

// The first ten rows are those of vLLM's tests (tests/v1/attention/test_attention_splitting.py).
INSTANTIATE_TEST_SUITE_P(Golden, SplitTable,
                         ValuesIn(std::vector<SplitCase>{
                             {{1, 1, 1}, 1, false, 3, {3, 0, 3, 0}},
                             {{1, 2, 1, 3, 2, 1, 2}, 3, false, 12, {7, 0, 12, 0}},
                             {{4, 5, 6, 7}, 3, false, 22, {0, 4, 0, 22}},
                             {{2, 1, 3, 4, 5, 6, 7, 8}, 4, false, 36, {4, 4, 10, 26}},
                             {{1, 1, 1}, 1, true, 3, {3, 0, 3, 0}},
                             {{2, 2, 1, 3, 2, 1, 2}, 3, true, 13, {2, 5, 4, 9}},
                             {{4, 5, 6, 7}, 3, true, 22, {0, 4, 0, 22}},
                             {{2, 2, 2, 4, 5, 6, 7, 8}, 4, true, 36, {3, 5, 6, 30}},
                             {{2, 1, 2, 4, 5, 6, 7, 8}, 4, true, 35, {1, 7, 2, 33}},
                             {{2, 2, 2, 0}, 3, true, 8, {4, 0, 8, 0}},
                             {{1, 1, 0, 0}, 1, true, 4, {4, 0, 4, 0}},
                             {{1, 1, 5, 5}, 1, true, 12, {2, 2, 2, 10}},
                             {{1, 1, 1}, 3, true, 3, {3, 0, 3, 0}},
                             {{1, 1, 7, 1}, 1, false, 10, {2, 2, 2, 8}},
                             {{}, 1, true, 0, {0, 0, 0, 0}},
                         }));

TEST(SplitDecodesAndPrefills, PaddedTokensBelongToTheLastSection) {
  TestBatch batch({1, 1, 5});
  batch.view.num_actual_tokens = 16;
  EXPECT_EQ(split_decodes_and_prefills(batch.view, 1, true), (BatchSplit{2, 1, 2, 14}));
}

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

TEST(SplitDecodesPrefillsAndExtends, DividesIntoThree) {
  TestBatch batch({1, 2, 4, 5, 6}, {10, 11, 20, 5, 6});  // vLLM's tests
  EXPECT_EQ(split_decodes_prefills_and_extends(batch.view, 3), (ExtendSplit{2, 1, 2, 3, 4, 11}));
}

TEST(SplitDecodesPrefillsAndExtends, SectionsMayBeEmpty) {
  TestBatch decodes({1, 1}, {7, 8});
  decodes.view.num_actual_tokens = 4;
  EXPECT_EQ(split_decodes_prefills_and_extends(decodes.view, 1), (ExtendSplit{2, 0, 0, 4, 0, 0}));
  EXPECT_EQ(split_decodes_prefills_and_extends(TestBatch({4, 5}, {20, 21}).view, 1), (ExtendSplit{0, 2, 0, 0, 9, 0}));
  EXPECT_EQ(split_decodes_prefills_and_extends(TestBatch({4, 5}).view, 1), (ExtendSplit{0, 0, 2, 0, 0, 9}));
  // A decode-long request behind an extend is counted with the extends; a first prefill of one token is a decode here.
  EXPECT_EQ(split_decodes_prefills_and_extends(TestBatch({4, 1, 5}, {20, 9, 5}).view, 1),
            (ExtendSplit{0, 2, 1, 0, 5, 5}));
}

}  // namespace
}  // namespace folio::inline v0::backends
