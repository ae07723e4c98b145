#include "folio/distributed/simulated_group.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "folio/types/error.hpp"

namespace folio::distributed {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

SimulatedGroupOptions options_of(int32_t rank, int32_t ranks_per_node) {
  SimulatedGroupOptions options;
  options.rank = rank;
  options.topology = {ranks_per_node, {1e9, 1e-6}, {1e8, 1e-5}};
  return options;
}

TEST(SimulatedGroup, CopiesAsIfAllRanksSentTheSame) {
  const auto group = make_simulated_group(3, options_of(1, 8));
  const std::vector<float> send{1, 2, 3};
  std::vector<float> recv(9);
  group->all_gather(send.data(), recv.data(), 3 * sizeof(float));
  EXPECT_THAT(recv, ElementsAre(1, 2, 3, 1, 2, 3, 1, 2, 3));
  const std::vector<float> parts{1, 2, 3, 4, 5, 6, 7, 8, 9};
  group->all_to_all(parts.data(), recv.data(), 3 * sizeof(float));
  EXPECT_EQ(recv, parts);
  std::vector<float> mine(3);
  group->reduce_scatter_sum(parts.data(), mine.data(), 3);
  EXPECT_THAT(mine, ElementsAre(4, 5, 6));
  const int32_t id = 7;
  std::vector<int32_t> ids(3);
  group->all_gather_host(&id, ids.data(), sizeof(id));
  EXPECT_THAT(ids, ElementsAre(7, 7, 7));
}

TEST(SimulatedGroup, CountsOneNode) {
  const auto group = make_simulated_group(4, options_of(0, 8));
  const std::vector<float> send(1000);
  std::vector<float> recv(4000), mine(1000);
  group->all_gather(send.data(), recv.data(), 4000);
  EXPECT_EQ(group->traffic().operations, 1);
  EXPECT_DOUBLE_EQ(group->traffic().bytes_sent, 3 * 4000.0);
  EXPECT_DOUBLE_EQ(group->traffic().seconds, 1e-6 + 3 * 4000.0 / 1e9);
  group->reset_traffic();
  group->all_reduce_sum(recv.data(), 4000);  // parts of 4,000 bytes, twice
  EXPECT_DOUBLE_EQ(group->traffic().bytes_sent, 2 * 3 * 4000.0);
  EXPECT_DOUBLE_EQ(group->traffic().seconds, 2 * (1e-6 + 3 * 4000.0 / 1e9));
  group->reset_traffic();
  group->barrier();
  EXPECT_DOUBLE_EQ(group->traffic().seconds, 1e-6);
}

TEST(SimulatedGroup, TheSlowerLinkDecides) {
  const std::vector<float> send(1000);
  std::vector<float> recv(6000);
  // Six ranks on nodes of four: rank 1 has three neighbours, rank 5 one.
  for (const auto& [rank, others] : {std::pair{1, 2}, {5, 4}}) {
    const auto group = make_simulated_group(6, options_of(rank, 4));
    group->all_gather(send.data(), recv.data(), 4000);
    EXPECT_DOUBLE_EQ(group->traffic().seconds, 1e-5 + others * 4000.0 / 1e8) << "rank " << rank;
    EXPECT_DOUBLE_EQ(group->traffic().bytes_sent, 5 * 4000.0);
  }
}

TEST(SimulatedGroup, ARateToOneRankBoundsFewRanks) {
  const std::vector<float> send(1000);
  std::vector<float> recv(8000);
  for (const auto& [world, bytes_at_full_rate] : {std::pair{2, 4.0 * 4000.0}, {8, 7 * 4000.0}}) {
    SimulatedGroupOptions options = options_of(0, 8);
    options.topology.within_node.bytes_per_second_to_one = 0.25e9;
    const auto group = make_simulated_group(world, options);
    group->all_gather(send.data(), recv.data(), 4000);
    EXPECT_DOUBLE_EQ(group->traffic().seconds, 1e-6 + bytes_at_full_rate / 1e9) << world;
  }
}

TEST(SimulatedGroup, OneRankMovesNothing) {
  const auto group = make_simulated_group(1);
  float data = 3;
  group->all_reduce_sum(&data, 1);
  EXPECT_EQ(data, 3);
  EXPECT_EQ(group->traffic().operations, 1);
  EXPECT_EQ(group->traffic().seconds, 0.0);
}

TEST(SimulatedGroup, RefusesWhatCannotBe) {
  const auto refusal = [](int32_t world, const SimulatedGroupOptions& options) -> std::string {
    try {
      make_simulated_group(world, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "nothing";
  };
  EXPECT_THAT(refusal(0, {}), HasSubstr("the world is 0"));
  EXPECT_THAT(refusal(2, options_of(2, 8)), HasSubstr("rank 2 of 2"));
  EXPECT_THAT(refusal(2, options_of(0, 0)), HasSubstr("a node has 0 ranks"));
  SimulatedGroupOptions options;
  options.topology.within_node.bytes_per_second = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(refusal(2, options), HasSubstr("the link within a node moves nan"));
  options = {};
  options.topology.within_node.bytes_per_second_to_one = -1;
  EXPECT_THAT(refusal(2, options), HasSubstr("moves -1 bytes a second to one rank"));
  options = {};
  options.topology.between_nodes.seconds_per_operation = -1;
  EXPECT_THAT(refusal(2, options), HasSubstr("an operation on the link between nodes takes -1"));
}

TEST(SimulatedGroup, FailsWithItsReason) {
  const auto group = make_simulated_group(2);
  group->fail("no more");
  try {
    group->barrier();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), HasSubstr("no more"));
  }
}

}  // namespace
}  // namespace folio::distributed
