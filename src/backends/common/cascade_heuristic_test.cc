#include "folio/backends/cascade_heuristic.hpp"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

class CascadeHeuristic : public ::testing::TestWithParam<folio::testing::GoldenCase> {};

TEST_P(CascadeHeuristic, Golden) {
  const auto& golden = GetParam();
  std::vector<int32_t> query_lens;
  for (const auto& [count, len] : golden.at<std::vector<std::pair<int32_t, int32_t>>>("queries")) {
    query_lens.insert(query_lens.end(), static_cast<size_t>(count), len);
  }
  CascadeHeuristicInput input;
  input.common_prefix_len = golden.at<int32_t>("prefix");
  input.query_lens = query_lens;
  input.num_query_heads = golden.ints("heads")[0];
  input.num_kv_heads = golden.ints("heads")[1];
  input.use_alibi = golden.value("alibi", false);
  input.use_sliding_window = golden.value("window", false);
  input.use_local_attention = golden.value("local", false);
  input.num_sms = golden.value("sms", 132);
  input.dcp_world_size = golden.value("dcp", 1);
  EXPECT_EQ(use_cascade_attention(input), golden.at<bool>("expected"));
}

INSTANTIATE_TEST_SUITE_P(Cases, CascadeHeuristic,
                         ::testing::ValuesIn(folio::testing::golden_cases("backends/cascade_heuristic")),
                         folio::testing::golden_case_name);

TEST(CascadeHeuristicErrors, RefusesCountsBelowOne) {
  CascadeHeuristicInput input;
  EXPECT_THROW(use_cascade_attention(input), Error);
}

}  // namespace
}  // namespace folio::inline v0::backends
