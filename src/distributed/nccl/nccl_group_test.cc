// Groups over NCCL whose ranks are threads with a GPU each: operations, captures, failures. On the emulated GPU with a
// fake NCCL, which holds a stream as the real one does; on GPUs as many ranks as there are.
#include "folio/distributed/nccl_group.hpp"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "distributed/nccl/nccl_library.hpp"
#include "folio/distributed/thread_group.hpp"
#include "folio/types/error.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

namespace folio::distributed {
namespace {

using cuda_test::CapturedGraph;
using cuda_test::check;
using cuda_test::TestStream;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

#if defined(FOLIO_EMULATED_CUDA)
const int kGpus = setenv("FOLIO_EMULATED_GPUS", "3", 1);  // before the runtime is asked
#endif
#if defined(FOLIO_TEST_NCCL)
const char* const kLibrary = FOLIO_TEST_NCCL;
#else
const char* const kLibrary = "";
#endif
constexpr milliseconds kLong = std::chrono::seconds(100);
constexpr milliseconds kShort{300};

int gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

#define NEEDS_GPUS(count) \
  if (gpus() < (count)) GTEST_SKIP() << "needs " << (count) << " GPUs, one a rank; there are " << gpus()

/// One rank's stream and memory.
class Gpu {
 public:
  explicit Gpu(int device) : device_(set_device(device)) {}
  ~Gpu() {
    static_cast<void>(cudaSetDevice(device_));
    for (float* const data : all_) static_cast<void>(cudaFree(data));
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  const TestStream& queue() const { return stream_; }
  Stream stream() const { return stream_.get(); }
  float* array(size_t count) {
    void* data = nullptr;
    check(cudaMalloc(&data, std::max<size_t>(count, 1) * sizeof(float)));
    all_.push_back(static_cast<float*>(data));
    return all_.back();
  }
  float* array(const std::vector<float>& values) {
    float* const data = array(values.size());
    set(data, values);
    return data;
  }
  void set(float* data, const std::vector<float>& values) {
    check(
        cudaMemcpyAsync(data, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice, stream_.native()));
    wait();
  }
  std::vector<float> get(const float* data, size_t count) {
    wait();
    std::vector<float> values(count);
    check(cudaMemcpyAsync(values.data(), data, count * sizeof(float), cudaMemcpyDeviceToHost, stream_.native()));
    wait();
    return values;
  }
  void wait() const { stream_.wait(); }

 private:
  static int set_device(int device) {
    check(cudaSetDevice(device));
    return device;
  }

  int device_;
  TestStream stream_;  ///< of the device: made behind it
  std::vector<float*> all_;
};

struct Rank {
  NcclGroup& group;
  Gpu& gpu;
  const Context& context;
};
using Body = std::function<void(const Rank&)>;
using MakeOptions = std::function<NcclGroupOptions(int32_t rank)>;

/// Runs a body a rank, each in its thread with its GPU. What each threw, if it did. A rank's group ends when all bodies
/// have.
std::vector<std::string> run_gpus(int32_t world, const Body& body, const MakeOptions& options) {
  std::vector<std::string> errors(static_cast<size_t>(world));
  const auto ranks = make_thread_groups(world, {kLong});
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      std::unique_ptr<Gpu> gpu;
      std::unique_ptr<NcclGroup> group;
      try {
        gpu = std::make_unique<Gpu>(r);
        const Context context = Context::cuda(r);
        group = make_nccl_group(context, options(r));
        EXPECT_EQ(group->rank(), r);
        EXPECT_EQ(group->size(), world);
        EXPECT_TRUE(group->enqueues());
        EXPECT_EQ(group->device(), context.device());
        body({*group, *gpu, context});
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(r)] = error.what();
        if (errors[static_cast<size_t>(r)].empty()) errors[static_cast<size_t>(r)] = "an error without words";
      }
      ranks[static_cast<size_t>(r)]->barrier();
      group = nullptr;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

NcclGroupOptions options_of(const NcclUniqueId& id, int32_t rank, int32_t world, milliseconds timeout) {
  NcclGroupOptions options;
  options.id = id;
  options.rank = rank;
  options.size = world;
  options.timeout = timeout;
  options.library = kLibrary;
  return options;
}

std::vector<std::string> run_gpus(int32_t world, const Body& body, milliseconds timeout = kLong) {
  const NcclUniqueId id = nccl_unique_id(kLibrary);
  return run_gpus(world, body, [&](int32_t rank) { return options_of(id, rank, world, timeout); });
}

template <typename Call>
void expect_error(ErrorCode code, const char* text, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

/// Values whose sums depend on the order of the additions.
float value(int32_t rank, size_t i) {
  return std::ldexp(1.0f + 0.1f * static_cast<float>(rank * 7 + static_cast<int32_t>(i % 1000)),
                    static_cast<int>((i + static_cast<size_t>(rank) * 5) % 11) - 4) *
         (((i + static_cast<size_t>(rank)) % 3 == 0) ? -1.0f : 1.0f);
}
std::vector<float> values(int32_t rank, size_t count) {
  std::vector<float> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = value(rank, i);
  return all;
}

/// The sums of values(rank, count) by a group of threads over the host's memory.
std::vector<float> thread_group_sums(int32_t world, size_t count) {
  std::vector<float> sums;
  run_ranks(world, [&](ProcessGroup& group) {
    std::vector<float> mine = values(group.rank(), count);
    group.all_reduce_sum(mine.data(), count);
    if (group.rank() == 0) sums = mine;
  });
  return sums;
}

const size_t kCounts[] = {0, 1, 7, 64, 2500, 70001};

class NcclGroups : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, NcclGroups, ::testing::Values(1, 2, 3));

TEST_P(NcclGroups, GatherAndExchange) {
  NEEDS_GPUS(GetParam());
  const auto errors = run_gpus(GetParam(), [](const Rank& at) {
    const int32_t rank = at.group.rank(), world = at.group.size();
    for (const size_t count : kCounts) {
      const size_t all = count * static_cast<size_t>(world), mine = static_cast<size_t>(rank) * count;
      float* const send = at.gpu.array(values(rank, all));
      float* const recv = at.gpu.array(std::vector<float>(all, -1.0f));
      std::vector<float> gathered, exchanged;
      for (int32_t from = 0; from < world; ++from) {
        for (size_t i = 0; i < count; ++i) gathered.push_back(value(from, i));
        for (size_t i = 0; i < count; ++i) exchanged.push_back(value(from, mine + i));
      }
      at.group.all_gather(send, recv, count * sizeof(float), at.gpu.stream());
      EXPECT_EQ(at.gpu.get(recv, all), gathered);
      at.gpu.set(recv, std::vector<float>(all, -1.0f));
      if (count > 0) at.gpu.set(recv + mine, values(rank, count));
      at.group.all_gather(recv + mine, recv, count * sizeof(float), at.gpu.stream());  // in place
      EXPECT_EQ(at.gpu.get(recv, all), gathered);
      at.gpu.set(recv, std::vector<float>(all, -1.0f));
      at.group.all_to_all(send, recv, count * sizeof(float), at.gpu.stream());
      EXPECT_EQ(at.gpu.get(recv, all), exchanged);
    }
    at.group.barrier(at.gpu.stream());
    at.group.check();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_P(NcclGroups, SumsHaveTheBitsOfAThreadGroup) {
  NEEDS_GPUS(GetParam());
  std::vector<std::vector<float>> expected;
  for (const size_t count : kCounts) expected.push_back(thread_group_sums(GetParam(), count));
  const auto errors = run_gpus(GetParam(), [&](const Rank& at) {
    const int32_t rank = at.group.rank(), world = at.group.size();
    for (size_t c = 0; c < std::size(kCounts); ++c) {
      const size_t count = kCounts[c];
      float* const data = at.gpu.array(values(rank, count));
      at.group.all_reduce_sum(data, count, at.gpu.stream());
      EXPECT_EQ(at.gpu.get(data, count), expected[c]) << count;
      // Rank r's part of the same, where it can be divided.
      const size_t part = count / static_cast<size_t>(world), used = part * static_cast<size_t>(world);
      float* const send = at.gpu.array(values(rank, used));
      float* const recv = at.gpu.array(std::vector<float>(part, -1.0f));
      at.group.reduce_scatter_sum(send, recv, part, at.gpu.stream());
      const auto first = expected[c].begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(rank) * part);
      EXPECT_EQ(at.gpu.get(recv, part), std::vector<float>(first, first + static_cast<std::ptrdiff_t>(part))) << count;
      EXPECT_EQ(at.gpu.get(send, used), values(rank, used));
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_P(NcclGroups, NcclsOwnSumsWherePermitted) {
  NEEDS_GPUS(GetParam());
  const NcclUniqueId id = nccl_unique_id(kLibrary);
  const auto errors = run_gpus(
      GetParam(),
      [](const Rank& at) {
        const auto world = static_cast<size_t>(at.group.size());
        std::vector<float> mine(10 * world);
        for (size_t i = 0; i < mine.size(); ++i) mine[i] = static_cast<float>(i + static_cast<size_t>(at.group.rank()));
        float* const data = at.gpu.array(mine);
        float* const recv = at.gpu.array(10);
        const auto sum = [&](size_t i) { return static_cast<float>(world * i + world * (world - 1) / 2); };
        at.group.reduce_scatter_sum(data, recv, 10, at.gpu.stream());
        const std::vector<float> part = at.gpu.get(recv, 10);
        for (size_t i = 0; i < 10; ++i) EXPECT_EQ(part[i], sum(static_cast<size_t>(at.group.rank()) * 10 + i));
        // No scratch is needed, so a capture may hold any size.
        const CapturedGraph graph(at.gpu.queue(), [&] { at.group.all_reduce_sum(data, mine.size(), at.gpu.stream()); });
        graph.launch(at.gpu.queue());
        const std::vector<float> all = at.gpu.get(data, mine.size());
        for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], sum(i));
      },
      [&](int32_t rank) {
        NcclGroupOptions options = options_of(id, rank, GetParam(), kLong);
        options.sums = NcclSums::kNccl;
        return options;
      });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_P(NcclGroups, GraphsHoldOperations) {
  NEEDS_GPUS(GetParam());
  constexpr size_t kCount = 999;
  const std::vector<float> sums = thread_group_sums(GetParam(), kCount);
  const NcclUniqueId id = nccl_unique_id(kLibrary);
  const auto errors = run_gpus(
      GetParam(),
      [&](const Rank& at) {
        const int32_t rank = at.group.rank(), world = at.group.size();
        const size_t all = kCount * static_cast<size_t>(world);
        float* const send = at.gpu.array(all);
        float* const gathered = at.gpu.array(all);
        float* const exchanged = at.gpu.array(all);
        float* const data = at.gpu.array(kCount);
        const CapturedGraph graph(at.gpu.queue(), [&] {
          at.group.all_gather(send, gathered, kCount * sizeof(float), at.gpu.stream());
          at.group.all_to_all(gathered, exchanged, kCount * sizeof(float), at.gpu.stream());
          at.group.barrier(at.gpu.stream());
          at.group.all_reduce_sum(data, kCount, at.gpu.stream());
        });
        for (int32_t replay = 0; replay < 3; ++replay) {
          at.gpu.set(send, std::vector<float>(all, static_cast<float>(100 * replay + rank)));
          at.gpu.set(data, values(rank, kCount));
          graph.launch(at.gpu.queue());
          at.group.watch(at.gpu.stream());
          const std::vector<float> from_all = at.gpu.get(gathered, all), mine = at.gpu.get(exchanged, all);
          for (size_t i = 0; i < all; ++i) {
            ASSERT_EQ(from_all[i], static_cast<float>(100 * replay) + static_cast<float>(i / kCount));
            ASSERT_EQ(mine[i], static_cast<float>(100 * replay + rank));
          }
          ASSERT_EQ(at.gpu.get(data, kCount), sums);
          at.group.check();
        }
      },
      [&](int32_t rank) {
        NcclGroupOptions options = options_of(id, rank, GetParam(), kLong);
        options.scratch_bytes = kCount * sizeof(float) + 256 * static_cast<size_t>(GetParam());
        return options;
      });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclGroup, ACaptureGetsNoNewScratch) {
  NEEDS_GPUS(2);
  const auto errors = run_gpus(2, [](const Rank& at) {
    float* const data = at.gpu.array(values(at.group.rank(), 5000));
    const CapturedGraph refused(at.gpu.queue(), [&] {
      expect_error(ErrorCode::kInvalidArgument, "all_reduce_sum needs 20480 bytes of scratch, the group has 0",
                   [&] { at.group.all_reduce_sum(data, 5000, at.gpu.stream()); });
    });
    at.group.all_reduce_sum(data, 5000, at.gpu.stream());  // makes it
    const CapturedGraph taken(at.gpu.queue(), [&] { at.group.all_reduce_sum(data, 5000, at.gpu.stream()); });
    at.gpu.wait();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_P(NcclGroups, HostsExchangeOverControlAndWithout) {
  NEEDS_GPUS(GetParam());
  const auto control = make_thread_groups(GetParam(), {kLong});
  for (const bool controlled : {true, false}) {
    const NcclUniqueId id = nccl_unique_id(kLibrary);
    const auto errors = run_gpus(
        GetParam(),
        [](const Rank& at) {
          const int32_t rank = at.group.rank(), world = at.group.size();
          for (const size_t count : {size_t{0}, size_t{1}, size_t{252}, size_t{253}, size_t{2500}}) {
            std::vector<float> send = values(rank, count), recv(count * static_cast<size_t>(world)), expected;
            for (int32_t r = 0; r < world; ++r) {
              const std::vector<float> theirs = values(r, count);
              expected.insert(expected.end(), theirs.begin(), theirs.end());
            }
            at.group.all_gather_host(send.data(), recv.data(), count * sizeof(float));
            EXPECT_EQ(recv, expected);
          }
        },
        [&](int32_t rank) {
          NcclGroupOptions options;
          options.timeout = kLong;
          options.library = kLibrary;
          options.control = control[static_cast<size_t>(rank)].get();  // brings the id
          return controlled ? options : options_of(id, rank, GetParam(), kLong);
        });
    EXPECT_THAT(errors, Each(IsEmpty()));
  }
}

TEST(NcclGroup, RanksThatHavePartedFindItOutOnTheHost) {
  NEEDS_GPUS(2);
  const auto control = make_thread_groups(2, {kLong});
  for (const bool controlled : {true, false}) {
    const NcclUniqueId id = nccl_unique_id(kLibrary);
    const auto make = [&](int32_t rank) {
      NcclGroupOptions options = options_of(id, rank, 2, kLong);
      if (controlled) options.control = control[static_cast<size_t>(rank)].get();
      return options;
    };
    const auto sizes = run_gpus(
        2,
        [](const Rank& at) {
          std::byte send[16] = {}, recv[32] = {};
          at.group.all_gather_host(send, recv, at.group.rank() == 0 ? 8 : 16);
        },
        make);
    EXPECT_THAT(sizes[0], HasSubstr("rank 0 sends 8 bytes after 0 operations, rank 1 16 bytes after 0"));
    EXPECT_THAT(sizes[1], HasSubstr("rank 1 sends 16 bytes"));
  }
  const NcclUniqueId id = nccl_unique_id(kLibrary);
  const auto counts = run_gpus(
      2,
      [](const Rank& at) {
        float* const data = at.gpu.array(values(0, 4));
        float* const all = at.gpu.array(8);
        if (at.group.rank() == 1) at.group.all_gather(data, all, 16, at.gpu.stream());
        int32_t send = 0, recv[2];
        expect_error(ErrorCode::kUnavailable, "operations", [&] { at.group.all_gather_host(&send, recv, 4); });
        at.gpu.wait();  // rank 1's operation, which rank 0 never joins, is aborted
        at.group.check();
      },
      [&](int32_t rank) {
        NcclGroupOptions options = options_of(id, rank, 2, kLong);
        options.control = control[static_cast<size_t>(rank)].get();
        return options;
      });
  EXPECT_THAT(counts, Each(AllOf(HasSubstr("after 0"), HasSubstr("after 1"))));
}

// A rank that does not come: the others' operations end, and every rank gets an error in time.
TEST(NcclGroup, TimesOut) {
  NEEDS_GPUS(2);
  const auto errors = run_gpus(
      2,
      [](const Rank& at) {
        float* const data = at.gpu.array(values(0, 4));
        float* const all = at.gpu.array(8);
        if (at.group.rank() == 1) std::this_thread::sleep_for(2 * kShort);
        at.group.all_gather(data, all, 16, at.gpu.stream());  // rank 1's comes too late
        at.gpu.wait();
        if (at.group.rank() == 1) {
          // Rank 0's part may have come before it gave up. Nothing comes of a second operation.
          at.group.barrier(at.gpu.stream());
          at.gpu.wait();
        }
        expect_error(ErrorCode::kUnavailable, "has failed", [&] { at.group.barrier(at.gpu.stream()); });
        at.group.check();
      },
      kShort);
  EXPECT_THAT(errors[0], HasSubstr("rank 0 waited 300 ms for the device to finish all_gather (operation 1)"));
  EXPECT_THAT(errors[1], HasSubstr("rank 1 waited 300 ms"));
}

TEST(NcclGroup, TimesOutInAReplayUnderWatch) {
  NEEDS_GPUS(2);
  const auto errors = run_gpus(
      2,
      [](const Rank& at) {
        float* const data = at.gpu.array(values(0, 4));
        float* const all = at.gpu.array(8);
        const CapturedGraph graph(at.gpu.queue(), [&] { at.group.all_gather(data, all, 16, at.gpu.stream()); });
        graph.launch(at.gpu.queue());
        at.gpu.wait();
        if (at.group.rank() == 1) return;
        graph.launch(at.gpu.queue());
        at.group.watch(at.gpu.stream());
        at.gpu.wait();
        at.group.check();
      },
      kShort);
  EXPECT_THAT(errors[0], HasSubstr("rank 0 waited 300 ms for the device to finish a stream under watch"));
  EXPECT_THAT(errors[1], IsEmpty());
}

// The operation that hangs is watched when the one before it has been passed.
TEST(NcclGroup, TheLastOfSeveralOperationsTimesOut) {
  NEEDS_GPUS(2);
  for (const int several : {1, 100}) {
    const auto errors = run_gpus(
        2,
        [&](const Rank& at) {
          float* const data = at.gpu.array(values(0, 4));
          float* const all = at.gpu.array(8);
          for (int i = 0; i < several; ++i) at.group.all_gather(data, all, 16, at.gpu.stream());
          if (at.group.rank() == 0) at.group.all_gather(data, all, 16, at.gpu.stream());
          at.gpu.wait();
          if (at.group.rank() == 0) at.group.check();
        },
        kShort);
    EXPECT_THAT(errors[0], HasSubstr("waited 300 ms for the device to finish all_gather"));
    EXPECT_THAT(errors[1], IsEmpty());
  }
}

// Operations that go on put no end off.
TEST(NcclGroup, TimesOutWhileOperationsGoOn) {
  NEEDS_GPUS(2);
  const auto errors = run_gpus(
      2,
      [](const Rank& at) {
        if (at.group.rank() == 1) return;
        float* const data = at.gpu.array(values(0, 4));
        float* const all = at.gpu.array(8);
        for (int i = 0; i < 100; ++i) {
          at.group.all_gather(data, all, 16, at.gpu.stream());
          std::this_thread::sleep_for(kShort / 6);
        }
      },
      kShort);
  EXPECT_THAT(errors[0], HasSubstr("for the device to finish all_gather (operation 1)"));
}

TEST(NcclGroup, AllGatherHostTimesOut) {
  NEEDS_GPUS(2);
  const auto errors = run_gpus(
      2,
      [](const Rank& at) {
        int32_t send = 0, recv[2];
        if (at.group.rank() == 0) at.group.all_gather_host(&send, recv, sizeof(send));
      },
      kShort);
  EXPECT_THAT(errors[0], HasSubstr("rank 0 waited 300 ms for the other ranks in all_gather_host"));
}

TEST(NcclGroup, AFailureEndsOperationsAndStays) {
  NEEDS_GPUS(2);
  const auto errors = run_gpus(2, [](const Rank& at) {
    float* const data = at.gpu.array(values(0, 4));
    float* const all = at.gpu.array(8);
    if (at.group.rank() == 0) at.group.all_gather(data, all, 16, at.gpu.stream());
    std::thread([&] {
      at.group.fail("the engine stops");
      at.group.fail("again");
    }).join();
    at.gpu.wait();
    expect_error(ErrorCode::kUnavailable, "the engine stops",
                 [&] { at.group.all_to_all(all, data, 4, at.gpu.stream()); });
    expect_error(ErrorCode::kUnavailable, "the engine stops",
                 [&] { at.group.all_gather(data, all, 0, at.gpu.stream()); });
    expect_error(ErrorCode::kUnavailable, "the engine stops", [&] { at.group.watch(at.gpu.stream()); });
    int32_t send = 0, recv[2];
    expect_error(ErrorCode::kUnavailable, "the engine stops",
                 [&] { at.group.all_gather_host(&send, recv, sizeof(send)); });
    at.group.check();
  });
  EXPECT_THAT(errors, Each(HasSubstr("the NCCL group has failed: the engine stops")));
}

TEST(NcclGroup, IsNotMadeWithoutEveryRank) {
  NEEDS_GPUS(1);
  expect_error(ErrorCode::kUnavailable, "rank 1 waited 300 ms for 2 ranks to make an NCCL group",
               [] { make_nccl_group(Context::cuda(0), options_of(nccl_unique_id(kLibrary), 1, 2, kShort)); });
}

TEST(NcclGroup, RefusesTwoRanksOnOneGpu) {
  NEEDS_GPUS(1);
  const NcclUniqueId id = nccl_unique_id(kLibrary);
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      expect_error(ErrorCode::kUnavailable, "making an NCCL communicator: invalid usage",
                   [&] { make_nccl_group(Context::cuda(0), options_of(id, r, 2, kLong)); });
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(NcclGroup, RefusesBadArguments) {
  NEEDS_GPUS(1);
  const auto refused = [](const char* text, const Context& context,
                          const std::function<void(NcclGroupOptions&)>& change) {
    NcclGroupOptions options = options_of({}, 0, 1, kLong);
    change(options);
    expect_error(ErrorCode::kInvalidArgument, text, [&] { make_nccl_group(context, options); });
  };
  const Context gpu = Context::cuda(0);
  refused("the context is a CPU's", Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}}), [](auto&) {});
  refused("the timeout is 0 ms", gpu, [](auto& options) { options.timeout = milliseconds(0); });
  refused("rank 1 of 1", gpu, [](auto& options) { options.rank = 1; });
  refused("none of communicator", gpu, [](auto& options) { options.id.reset(); });
  refused("both given", gpu, [](auto& options) { options.communicator = &options; });
  expect_error(ErrorCode::kUnavailable, "NCCL cannot be loaded", [] { nccl_unique_id("/nowhere/libnccl.so.2"); });
  NcclGroupOptions large = options_of(nccl_unique_id(kLibrary), 0, 1, kLong);
  large.scratch_bytes = size_t{1} << 60;
  expect_error(ErrorCode::kOutOfMemory, "", [&] { make_nccl_group(gpu, large); });
  const auto errors = run_gpus(1, [](const Rank& at) {
    float* const data = at.gpu.array(8);
    const auto refused_call = [&](const char* text, const auto& call) {
      expect_error(ErrorCode::kInvalidArgument, text, call);
    };
    refused_call("recv is null", [&] { at.group.all_gather(data, nullptr, 4); });
    refused_call("send overlaps recv", [&] { at.group.all_gather(data, data + 1, 8); });
    refused_call("send overlaps recv", [&] { at.group.all_to_all(data, data, 4); });
    refused_call("send overlaps recv", [&] { at.group.reduce_scatter_sum(data, data, 1); });
    refused_call("data is null", [&] { at.group.all_reduce_sum(nullptr, 1); });
    refused_call("exceeds memory", [&] { at.group.all_to_all(data, data + 4, SIZE_MAX); });
    at.group.check();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

/// A communicator as an engine has one: blocking, and not the group's.
class EngineCommunicator {
 public:
  EngineCommunicator(const NcclUniqueId& id, int32_t rank, int32_t world) : nccl_(nccl_library(kLibrary)) {
    ncclUniqueId native;
    std::memcpy(&native, id.data(), sizeof(native));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    if (nccl_.comm_init_rank_config(&communicator_, world, native, rank, &config) != ncclSuccess) {
      throw std::runtime_error("the engine has no communicator");
    }
  }
  ~EngineCommunicator() { abort(); }
  EngineCommunicator(const EngineCommunicator&) = delete;
  EngineCommunicator& operator=(const EngineCommunicator&) = delete;
  ncclComm_t get() const { return communicator_; }
  void abort() {
    if (communicator_ != nullptr) nccl_.comm_abort(communicator_);
    communicator_ = nullptr;
  }

 private:
  const NcclLibrary& nccl_;
  ncclComm_t communicator_ = nullptr;
};

TEST(NcclGroup, UsesAnEnginesCommunicatorAndLeavesIt) {
  NEEDS_GPUS(2);
  const NcclUniqueId id = nccl_unique_id(kLibrary);
  std::vector<std::unique_ptr<EngineCommunicator>> engines(2);
  const auto make = [&](int32_t rank) {
    auto& engine = engines[static_cast<size_t>(rank)];
    if (engine == nullptr) engine = std::make_unique<EngineCommunicator>(id, rank, 2);
    NcclGroupOptions options;
    options.communicator = engine->get();
    options.timeout = kShort;
    options.library = kLibrary;
    return options;
  };
  const std::vector<float> sums = thread_group_sums(2, 100);
  for (int group = 0; group < 2; ++group) {  // the communicator outlives the first
    const auto errors = run_gpus(
        2,
        [&](const Rank& at) {
          float* const data = at.gpu.array(values(at.group.rank(), 100));
          at.group.all_reduce_sum(data, 100, at.gpu.stream());
          EXPECT_EQ(at.gpu.get(data, 100), sums);
        },
        make);
    EXPECT_THAT(errors, Each(IsEmpty()));
  }
  const auto errors = run_gpus(
      2,
      [&](const Rank& at) {
        expect_error(ErrorCode::kInvalidArgument, "the context device",
                     [&] { make_nccl_group(Context::cuda(1 - at.group.rank()), make(at.group.rank())); });
        if (at.group.rank() == 1) return;
        float* const data = at.gpu.array(8);
        at.group.all_gather(data, data, 4, at.gpu.stream());
        std::this_thread::sleep_for(2 * kShort);
        EXPECT_EQ(cudaStreamQuery(at.gpu.queue().native()), cudaErrorNotReady);  // reported, not aborted
        static_cast<void>(cudaGetLastError());
        EXPECT_THROW(at.group.check(), Error);
        engines[0]->abort();  // as the engine's watchdog does
        at.gpu.wait();
        at.group.check();
      },
      make);
  EXPECT_THAT(errors[0], HasSubstr("rank 0 waited 300 ms for the device to finish all_gather"));
  EXPECT_THAT(errors[1], IsEmpty());
}

// Two launches on two streams: a stream goes on when every rank's has come to the barrier.
TEST(NcclGroup, ABarrierHoldsStreams) {
  NEEDS_GPUS(2);
  std::atomic<bool> came{false};
  const auto errors = run_gpus(2, [&](const Rank& at) {
    if (at.group.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      came = true;
    }
    at.group.barrier(at.gpu.stream());
    at.gpu.wait();
    EXPECT_TRUE(came);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

#if defined(FOLIO_EMULATED_CUDA)
template <typename Function>
Function* fake(const char* name) {
  void* const library = dlopen(kLibrary, RTLD_NOW);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

class NothingIsLeft : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo& test) override {
    static_cast<void>(test);
    EXPECT_EQ(fake<int()>("fake_nccl_communicators")(), 0) << "communicators are left";
  }
};
const bool kListens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new NothingIsLeft);
  return true;
}();

TEST(NcclGroup, ChecksWhatNcclHasMetInTheBackground) {
  const NcclUniqueId id = nccl_unique_id(kLibrary);
  std::vector<std::unique_ptr<EngineCommunicator>> engines(1);
  const auto errors = run_gpus(
      1,
      [&](const Rank& at) {
        at.group.check();
        fake<void(ncclComm_t)>("fake_nccl_break")(engines[0]->get());
        at.group.check();
      },
      [&](int32_t rank) {
        engines[0] = std::make_unique<EngineCommunicator>(id, rank, 1);
        NcclGroupOptions options;
        options.communicator = engines[0]->get();
        options.library = kLibrary;
        return options;
      });
  EXPECT_THAT(errors[0], HasSubstr("NCCL: remote process exited"));
}

TEST(NcclGroup, IsConnectedWhenItIsThere) {
  const auto count = fake<int()>("fake_nccl_operations");
  const int before = count();
  const auto errors = run_gpus(2, [](const Rank&) {});
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_EQ(count() - before, 4);  // of either rank an all-gather, and sends and receives
}

TEST(NcclGroup, RanksThatDisagreeAboutSizesTimeOut) {
  const auto errors = run_gpus(
      2,
      [](const Rank& at) {
        float* const data = at.gpu.array(values(0, 4));
        float* const all = at.gpu.array(8);
        at.group.all_gather(data, all, at.group.rank() == 0 ? 8 : 16, at.gpu.stream());
        at.gpu.wait();
        at.group.check();
      },
      kShort);
  EXPECT_THAT(errors, Each(HasSubstr("waited 300 ms for the device to finish all_gather")));
}

#if defined(FOLIO_TEST_REAL_NCCL)
TEST(NcclGroup, FindsItsFunctionsInTheRealLibrary) {
  EXPECT_NE(nccl_unique_id(FOLIO_TEST_REAL_NCCL), NcclUniqueId{});
}
#endif
#endif

}  // namespace
}  // namespace folio::distributed
