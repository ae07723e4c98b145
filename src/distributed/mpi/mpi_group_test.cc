// The group of MPI processes: operations, failures, and attention over a cache divided between processes. Run by
// mpirun.
#include "folio/distributed/mpi_group.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>
#include <string>
#include <vector>

#include "distributed/dcp_case_test_util.hpp"
#include "folio/types/error.hpp"

namespace folio::distributed::testing {
namespace {

using ::testing::HasSubstr;

TEST(MpiGroup, GathersExchangesAndSums) {
  const auto group = make_mpi_group();
  const int32_t rank = group->rank(), world = group->size();
  for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{2500}}) {
    const auto all = count * static_cast<size_t>(world), mine = static_cast<size_t>(rank) * count;
    const auto value = [](size_t from, size_t i) {
      return static_cast<float>(from * 3 + 1) + 0.1f * static_cast<float>(i);
    };
    std::vector<float> send(all), recv(all, -1.0f), part(count, -1.0f);
    for (size_t i = 0; i < all; ++i) send[i] = value(static_cast<size_t>(rank), i);
    group->all_gather(send.data(), recv.data(), count * sizeof(float));
    for (size_t i = 0; i < all; ++i) ASSERT_EQ(recv[i], value(i / count, i % count));
    std::fill(recv.begin(), recv.end(), -1.0f);
    std::copy_n(send.begin(), count, recv.begin() + static_cast<std::ptrdiff_t>(mine));
    group->all_gather(recv.data() + mine, recv.data(), count * sizeof(float));  // in place
    for (size_t i = 0; i < all; ++i) ASSERT_EQ(recv[i], value(i / count, i % count));
    group->all_to_all(send.data(), recv.data(), count * sizeof(float));
    for (size_t i = 0; i < all; ++i) ASSERT_EQ(recv[i], value(i / count, mine + i % count));
    const auto sum = [&](size_t i) {
      float total = value(0, i);
      for (int32_t r = 1; r < world; ++r) total += value(static_cast<size_t>(r), i);
      return total;
    };
    group->reduce_scatter_sum(send.data(), part.data(), count);
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(part[i], sum(mine + i));
    std::vector<float> odd(send.begin(), send.begin() + static_cast<std::ptrdiff_t>(count));
    group->all_reduce_sum(odd.data(), count);
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(odd[i], sum(i));
    group->barrier();
  }
}

TEST(MpiGroup, FailsAtOnceOrWhenTheTimeIsUp) {
  const auto group = make_mpi_group({nullptr, std::chrono::milliseconds(200)});
  if (group->rank() == 0) {
    group->fail("no memory");
    try {
      group->barrier();
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_THAT(error.what(), HasSubstr("no memory"));
    }
  } else {
    try {
      group->barrier();
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_THAT(error.what(), HasSubstr("waited 200 ms in barrier"));
    }
    EXPECT_THROW(group->barrier(), Error);
  }
}

TEST(MpiGroup, RefusesBadArguments) {
  EXPECT_THROW(make_mpi_group({nullptr, std::chrono::milliseconds(0)}), Error);
  const auto group = make_mpi_group();
  float data[4] = {};
  EXPECT_THROW(group->all_gather(data, nullptr, 4), Error);
  EXPECT_THROW(group->all_to_all(data, data, 4), Error);
  EXPECT_THROW(group->barrier(Stream{data}), Error);
  group->barrier();
}

// Ranks of other sizes of the world divide the same problem.
TEST(MpiGroup, AttentionEqualsTheUndividedCache) {
  const auto group = make_mpi_group();
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  DcpSetup plain;
  plain.world = group->size();
  plain.requests = {{5, 1}, {70, 4}, {1, 1}, {64, 17}, {40, 40}, {0, 0}, {131, 2}};
  for (const DcpCombine combine : {DcpCombine::kAllGatherReduceScatter, DcpCombine::kAllToAll}) {
    for (const int32_t interleave : {1, 16, 32}) {
      DcpSetup everything = plain;
      everything.combine = combine;
      everything.interleave = interleave;
      everything.hnd = interleave == 16;
      everything.window_left = 40;
      everything.alibi = everything.sinks = true;
      everything.num_cached = 2;
      DcpSetup fp8 = plain;
      fp8.combine = combine;
      fp8.interleave = interleave;
      fp8.model = DType::kBFloat16;
      fp8.cache = DType::kFloat8E4M3;
      fp8.k_scale = 0.5f;
      fp8.v_scale = 2.0f;
      DcpSetup halved = everything;
      halved.model = halved.cache = halved.partial = DType::kBFloat16;
      for (const DcpSetup& setup : {plain, everything, fp8, halved}) {
        DcpCase whole(setup);
        whole.run(*group, context);
        EXPECT_EQ(whole.wrong_output(group->rank()), "") << to_string(combine) << ", interleave " << interleave;
      }
    }
  }
}

}  // namespace
}  // namespace folio::distributed::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const bool before_init = [] {
    try {
      folio::distributed::make_mpi_group();
    } catch (const folio::Error& error) {
      return error.code() == folio::ErrorCode::kUnavailable;
    }
    return false;
  }();
  MPI_Init(&argc, &argv);
  int failed = RUN_ALL_TESTS();
  if (!before_init) {
    std::fprintf(stderr, "a group was made before MPI_Init\n");
    failed = 1;
  }
  MPI_Finalize();
  return failed;
}
