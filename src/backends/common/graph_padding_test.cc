#include "folio/backends/graph_padding.hpp"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_cases;
using folio::testing::GoldenCase;

std::vector<GoldenCase> cases(const char* array) {
  return golden_cases("backends/graph_padding", array);
}

TEST(GraphPaddingTest, PadsToTheNextCapturedSize) {
  for (const GoldenCase& c : cases("padded")) {
    SCOPED_TRACE(c.data.dump());
    const std::vector<int32_t> sizes = default_capture_sizes(c.at<int32_t>("max_capture_size"));
    EXPECT_EQ(sizes.size(), c.at<size_t>("num_sizes"));
    const GraphPadding padding(sizes);
    EXPECT_EQ(padding.max_capture_size(), sizes.back());
    std::vector<int32_t> padded;
    for (int32_t num_tokens : c.ints("num_tokens")) padded.push_back(padding.pad_for_cudagraph(num_tokens));
    EXPECT_EQ(padded, c.ints("padded"));
    EXPECT_THROW(padding.pad_for_cudagraph(c.at<int32_t>("refused")), Error);
    EXPECT_THROW(padding.pad_for_cudagraph(-1), Error);
  }
}

TEST(GraphPaddingTest, RefusesSizesThatDoNotAscend) {
  EXPECT_THROW(GraphPadding({}), Error);
  EXPECT_THROW(GraphPadding(std::array{1, 4, 4}), Error);
  EXPECT_THROW(GraphPadding(std::array{0, 4}), Error);
  EXPECT_THROW(default_capture_sizes(0), Error);
}

TEST(GraphPaddingTest, BoundsTheDefaultSize) {
  for (const GoldenCase& c : cases("max_capture_sizes")) {
    SCOPED_TRACE(c.data.dump());
    EXPECT_EQ(
        default_max_capture_size(c.at<int32_t>("max_num_seqs"), c.value("tokens_per_decode", 1), c.value("limit", 512)),
        c.at<int32_t>("size"));
  }
  EXPECT_THROW(default_max_capture_size(0), Error);
}

TEST(SchedulerMetadataSize, CountsTheIntegersOfAnFa3Schedule) {
  for (const GoldenCase& c : cases("schedule_sizes")) {
    EXPECT_EQ(fa3_scheduler_metadata_size(c.at<int32_t>("num_reqs")), c.at<int32_t>("ints")) << c.data;
  }
  EXPECT_THROW(fa3_scheduler_metadata_size(-1), Error);
  EXPECT_THROW(fa3_scheduler_metadata_size(2147483647), Error);
}

TEST(GraphPadValuesTest, AreTheLargestOfAllBuilders) {
  for (const GoldenCase& c : cases("pad_values")) {
    std::vector<GraphPadValues> builders;
    for (const auto& pair : c.data.at("builders")) builders.push_back({pair.at(0), pair.at(1)});
    const std::vector<int32_t> expected = c.ints("consolidated");
    EXPECT_EQ(consolidate_pad_values(builders), (GraphPadValues{expected[0], expected[1]})) << c.data;
  }
}

TEST(GraphPadValuesTest, FillTheLengthsOfPaddingRequests) {
  for (const GoldenCase& c : cases("padded_seq_lens")) {
    std::vector<int32_t> seq_lens = c.ints("seq_lens");
    pad_seq_lens(seq_lens, c.at<int32_t>("num_reqs"), {c.at<int32_t>("pad"), -1});
    EXPECT_EQ(seq_lens, c.ints("expected")) << c.data;
    EXPECT_THROW(pad_seq_lens(seq_lens, static_cast<int32_t>(seq_lens.size()) + 1, {}), Error);
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
