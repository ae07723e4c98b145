// Operations of ranks that are threads, and ends: a rank that throws, leaves, stays away or asks for something else.
#include "folio/distributed/thread_group.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "folio/types/error.hpp"

namespace folio::distributed {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ThreadGroups : public ::testing::TestWithParam<int32_t> {};

TEST_P(ThreadGroups, GatherExchangeAndSum) {
  run_ranks(GetParam(), [](ProcessGroup& group) {
    const int32_t rank = group.rank(), world = group.size();
    ASSERT_EQ(world, GetParam());
    for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{2500}}) {
      const auto all = count * static_cast<size_t>(world);
      const auto value = [&](int32_t from, size_t i) {
        return static_cast<float>(from * 3 + 1) + 0.1f * static_cast<float>(i);
      };
      const auto mine = static_cast<size_t>(rank) * count;
      std::vector<float> send(all), recv(all, -1.0f), part(count, -1.0f);
      for (size_t i = 0; i < all; ++i) send[i] = value(rank, i);

      group.all_gather(send.data(), recv.data(), count * sizeof(float));
      for (size_t i = 0; i < all; ++i) ASSERT_EQ(recv[i], value(static_cast<int32_t>(i / count), i % count));
      std::copy_n(send.begin(), count, recv.begin() + static_cast<std::ptrdiff_t>(mine));
      group.all_gather(recv.data() + mine, recv.data(), count * sizeof(float));  // in place
      for (size_t i = 0; i < all; ++i) ASSERT_EQ(recv[i], value(static_cast<int32_t>(i / count), i % count));
      std::fill(recv.begin(), recv.end(), -1.0f);
      group.all_gather_host(send.data(), recv.data(), count * sizeof(float));
      for (size_t i = 0; i < all; ++i) ASSERT_EQ(recv[i], value(static_cast<int32_t>(i / count), i % count));

      group.all_to_all(send.data(), recv.data(), count * sizeof(float));
      for (size_t i = 0; i < all; ++i) ASSERT_EQ(recv[i], value(static_cast<int32_t>(i / count), mine + i % count));

      const auto sum = [&](size_t i) {
        float total = value(0, i);
        for (int32_t r = 1; r < world; ++r) total += value(r, i);
        return total;
      };
      group.reduce_scatter_sum(send.data(), part.data(), count);
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(part[i], sum(mine + i));
      group.all_reduce_sum(send.data(), all);
      for (size_t i = 0; i < all; ++i) ASSERT_EQ(send[i], sum(i));
      group.barrier();
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Worlds, ThreadGroups, ::testing::Values(1, 2, 3, 4, 7));

TEST(ThreadGroup, OperationsKeepTheirOrderOverManyRounds) {
  std::atomic<int32_t> turn{0};
  run_ranks(4, [&](ProcessGroup& group) {
    for (int32_t round = 0; round < 500; ++round) {
      int32_t seen[4];
      group.all_gather(&round, seen, sizeof(round));
      for (const int32_t other : seen) ASSERT_EQ(other, round);
      if (round % 4 == group.rank()) ++turn;
      group.barrier();
      ASSERT_EQ(turn.load(), round + 1);
      group.barrier();
    }
  });
}

/// What every rank got: the text of its error, or nothing.
std::vector<std::string> errors_of(int32_t world, const std::function<void(ProcessGroup&)>& body,
                                   milliseconds timeout) {
  auto groups = make_thread_groups(world, {timeout});
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < groups.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        body(*groups[r]);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kUnavailable) << error.what();
        errors[r] = error.what();
      } catch (const std::exception&) {
        errors[r] = "its own";
      }
      groups[r].reset();  // as the end of a thread that owns its handle does
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(ThreadGroup, ARankThatThrowsEndsTheOthers) {
  try {
    run_ranks(4, [](ProcessGroup& group) {
      group.barrier();
      if (group.rank() == 2) throw std::runtime_error("rank 2 has no memory");
      group.barrier();
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "rank 2 has no memory");
  }
  const auto errors = errors_of(
      3,
      [](ProcessGroup& group) {
        if (group.rank() == 1) throw std::runtime_error("");
        float data = 1.0f;
        group.all_reduce_sum(&data, 1);
      },
      std::chrono::seconds(40));
  EXPECT_THAT(errors, ElementsAre(HasSubstr("rank 1 has left it"), "its own", HasSubstr("rank 1 has left it")));
}

TEST(ThreadGroup, AFailureStaysAndHasItsFirstReason) {
  const auto errors = errors_of(
      2,
      [](ProcessGroup& group) {
        if (group.rank() == 0) {
          group.fail("the engine stops");
          group.fail("again");
        }
        EXPECT_THROW(group.barrier(), Error);
        group.barrier();
      },
      std::chrono::seconds(40));
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("has failed: the engine stops"));
}

TEST(ThreadGroup, TimesOut) {
  auto groups = make_thread_groups(2, {milliseconds(20)});
  EXPECT_EQ(groups[0]->timeout(), milliseconds(20));
  try {
    groups[0]->barrier();
    ADD_FAILURE() << "rank 1 never came";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), HasSubstr("rank 0 waited 20 ms in barrier for 1 of 2 ranks"));
  }
  EXPECT_THROW(groups[1]->barrier(), Error);  // the late one does not wait for nothing
}

TEST(ThreadGroup, RanksThatDisagreeAllFail) {
  const auto sizes = errors_of(
      2,
      [](ProcessGroup& group) {
        std::vector<int32_t> send(4), recv(8);
        group.all_gather(send.data(), recv.data(), group.rank() == 0 ? 4 : 8);
      },
      std::chrono::seconds(40));
  for (const std::string& error : sizes) {
    EXPECT_THAT(error, HasSubstr("rank 0 calls all_gather of 4 bytes, rank 1 all_gather of 8 bytes"));
  }
  const auto names = errors_of(
      2,
      [](ProcessGroup& group) {
        float data[2] = {};
        if (group.rank() == 0) group.barrier();
        group.all_reduce_sum(data, 2);
      },
      std::chrono::seconds(40));
  for (const std::string& error : names) EXPECT_THAT(error, HasSubstr("rank 0 calls barrier"));
}

TEST(ThreadGroup, RefusesBadArgumentsBeforeAnythingIsSent) {
  EXPECT_THROW(make_thread_groups(0), Error);
  EXPECT_THROW(make_thread_groups(2, {milliseconds(0)}), Error);
  auto groups = make_thread_groups(2, {std::chrono::seconds(40)});  // nobody else comes: waiting would hang
  ProcessGroup& group = *groups[0];
  float data[8] = {};
  const auto refused = [](auto call, const char* text) {
    try {
      call();
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  refused([&] { group.all_gather(data, nullptr, 4); }, "recv is null");
  refused([&] { group.all_gather(nullptr, data, 4); }, "send is null");
  refused([&] { group.all_gather(data + 1, data, 4); }, "send overlaps recv");
  refused([&] { group.all_to_all(data, data + 1, 4); }, "send overlaps recv");
  refused([&] { group.reduce_scatter_sum(data, data + 1, 1); }, "send overlaps recv");
  refused([&] { group.all_reduce_sum(nullptr, 1); }, "data is null");
  refused([&] { group.all_to_all(data, data + 4, SIZE_MAX / 2); }, "exceeds memory");
  refused([&] { group.barrier(Stream{data}); }, "default stream");
}

}  // namespace
}  // namespace folio::distributed
