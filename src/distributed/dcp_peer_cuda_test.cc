// Attention over a divided cache whose ranks exchange by peer memory: eagerly and in graphs, on as many GPUs as there
// are and several ranks on one, and what ranks are told when one of them stays away.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "attention/table_checks_test_util.hpp"
#include "core/error.hpp"
#include "distributed/dcp_steps_test_util.hpp"

namespace folio::distributed::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// A kernel that waits for another rank's must not keep the runtime from loading that one's code.
const bool loads_at_once = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0;

class DcpPeersOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU";
    for (int32_t i = 0; i < count; ++i) devices_.push_back({DeviceType::kCuda, i});
  }

  /// Runs body(group, context) on a thread for each rank, whose GPU is the thread's current one.
  void run_ranks_on_gpus(int32_t world, const std::function<void(EnqueuedGroup&, const Context&)>& body,
                         milliseconds timeout = std::chrono::seconds(60)) const {
    run_emulated_ranks(
        world, devices_,
        [&](EnqueuedGroup& group) {
          check(cudaSetDevice(group.device().index));
          body(group, Context::cuda(group.device().index));
        },
        timeout);
  }
  bool has_two() const { return devices_.size() > 1; }

 private:
  std::vector<Device> devices_;
};

std::vector<DcpSetup> peer_setups() {
  std::vector<DcpSetup> all;
  const auto add = [&](const char* name, auto change) {
    all.push_back(small_setup());
    all.back().name = name;
    change(all.back());
  };
  add("plain", [](DcpSetup&) {});
  add("three ranks, all to all, ALiBi, a window", [](DcpSetup& s) {
    s.world = 3, s.interleave = 4, s.combine = DcpCombine::kAllToAll, s.alibi = true, s.window_left = 12;
  });
  add("four ranks, all cached, sinks", [](DcpSetup& s) { s.world = 4, s.num_cached = 3, s.sinks = true; });
  add("replicated queries", [](DcpSetup& s) { s.replicated_queries = true, s.num_cached = 1; });
  add("results of all heads", [](DcpSetup& s) { s.world = 3, s.replicated_queries = s.all_heads_out = true; });
  add("bfloat16 partial results, three ranks, sinks",
      [](DcpSetup& s) { s.partial = DType::kBFloat16, s.world = 3, s.sinks = true, s.num_cached = 1; });
  add("bfloat16 partial results of all heads", [](DcpSetup& s) {
    s.partial = DType::kBFloat16, s.replicated_queries = s.all_heads_out = true, s.num_cached = 3;
  });
  add("a q scale per request and head", [](DcpSetup& s) {
    s.query = s.cache = DType::kFloat8E4M3, s.num_cached = 3;
    s.q_granularity = ScaleGranularity::kPerRequestAndHead, s.q_scales = {0.5f, 1.0f, 2.0f, 0.25f, 1.0f, 3.0f};
  });
  add("cross attention", [](DcpSetup& s) {
    s.cross = true, s.mask = MaskKind::kNone, s.num_cached = 3, s.requests = {{37, 1}, {3, 5}, {0, 2}};
  });
  add("one rank", [](DcpSetup& s) { s.world = 1; });
  return all;
}

DcpConfig peer_config(const DcpCase& whole) {
  DcpConfig config = whole.config();
  config.transport = DcpTransport::kPeer;
  return config;
}

/// A DcpAttention that plans small batches and then larger ones has memory that grows.
TEST_F(DcpPeersOnGpu, StepsThatAreNotCaptured) {
  for (const DcpSetup& setup : peer_setups()) {
    DcpSetup smaller = setup;
    smaller.requests = {{1, 1}, {3, 1}, {setup.cross ? 0 : 5, 1}};
    DcpCase whole(setup), first(smaller, 3);
    run_ranks_on_gpus(setup.world, [&](EnqueuedGroup& group, const Context& context) {
      RankStep step(whole, group, context, peer_config(whole));
      for (DcpCase* const given : {&first, &whole, &first, &whole}) {
        step.memory.load(*given);
        group.meet();
        const DcpPlan plan = step.attention.plan(given->batch(), step.stream.get());
        EXPECT_EQ(plan.over_peer_memory, setup.world > 1) << setup.name;
        const Workspace workspace = step.workspace(plan);
        group.meet();  // allocating waits for the whole device
        step.attention.run(plan, step.memory.args(), workspace, step.stream.get());
        step.stream.wait();
        group.meet();
        step.memory.store(*given, step.attention);
        EXPECT_NO_THROW(step.attention.check());
        group.meet();
        EXPECT_EQ(given->wrong_output(group.rank()), "") << setup.name;
        group.meet();
      }
    });
  }
}

/// Replays of an odd number of layers: the halves of the memory change sides from one to the next.
TEST_F(DcpPeersOnGpu, GraphsOfOddNumbersOfLayers) {
  for (const int32_t layers : {1, 3}) {
    for (const DcpSetup& setup : peer_setups()) {
      std::vector<DcpCase> cases;
      for (uint32_t seed = 1; seed <= 3; ++seed) cases.emplace_back(setup, seed);
      run_ranks_on_gpus(setup.world, [&](EnqueuedGroup& group, const Context& context) {
        DcpConfig config = peer_config(cases[0]);
        config.bounds = kBounds;
        RankStep step(cases[0], group, context, config);
        const DcpPlan plan = step.attention.plan(cases[0].batch(), step.stream.get());
        EXPECT_EQ(plan.over_peer_memory, setup.world > 1) << setup.name;
        step.scratch = std::make_unique<DeviceMemory>(step.attention.workspace_size());
        const CapturedGraph graph(step.stream, [&] {
          for (int32_t layer = 0; layer < layers; ++layer) {
            step.attention.run(plan, step.memory.args(), step.scratch->workspace(), step.stream.get());
          }
        });
        for (DcpCase& given : cases) {
          step.memory.load(given);
          step.attention.plan(given.batch(), step.stream.get());
          group.meet();
          graph.launch(step.stream);
          step.stream.wait();
          group.meet();
          step.memory.store(given, step.attention);
          EXPECT_NO_THROW(step.attention.check()) << setup.name;
          group.meet();
        }
      });
      for (const DcpCase& given : cases) EXPECT_EQ(given.wrong_outputs(), "") << setup.name << ", " << layers;
    }
  }
}

/// Rows that do not begin where several elements could be written at once get the same bits.
TEST_F(DcpPeersOnGpu, OutputsOfAnyStrides) {
  DcpCase whole(small_setup());
  run_ranks_on_gpus(2, [&](EnqueuedGroup& group, const Context& context) {
    RankStep step(whole, group, context, peer_config(whole));
    const DcpPlan plan = step.attention.plan(whole.batch(), step.stream.get());
    const Workspace workspace = step.workspace(plan);
    DcpArgs apart = step.memory.args();
    const int64_t dim = apart.out.shape[2], heads = apart.out.shape[1], rows = whole.tokens();
    apart.out.strides[1] = dim + 1;
    apart.out.strides[0] = heads * (dim + 1) + 2;
    const size_t bytes = static_cast<size_t>(apart.out.shape[0] * apart.out.strides[0]) * sizeof(uint16_t);
    DeviceMemory memory(bytes);
    apart.out.data = memory.data();
    group.meet();
    step.attention.run(plan, step.memory.args(), workspace, step.stream.get());
    step.attention.run(plan, apart, workspace, step.stream.get());
    step.stream.wait();
    group.meet();
    step.memory.store(whole, step.attention);
    std::vector<uint16_t> values(bytes / sizeof(uint16_t));
    memory.get(values.data(), bytes);
    const auto* const packed =
        reinterpret_cast<const uint16_t*>(whole.ranks[static_cast<size_t>(group.rank())].out.data());
    for (int64_t row = 0; row < rows * heads; ++row) {
      const int64_t at = row / heads * apart.out.strides[0] + row % heads * apart.out.strides[1];
      for (int64_t d = 0; d < dim; ++d) {
        EXPECT_EQ(values[static_cast<size_t>(at + d)], packed[row * dim + d]) << row << ", " << d;
      }
      EXPECT_EQ(values[static_cast<size_t>(at + dim)], 0xffff) << "written behind row " << row;
    }
    group.meet();
  });
  EXPECT_EQ(whole.wrong_outputs(), "");
}

/// Many launches that nobody waits for, of two layers by turns: what a rank that is ahead stores must not be taken for
/// what it stored before.
TEST_F(DcpPeersOnGpu, RanksThatRunAhead) {
  DcpSetup setup = small_setup();
  setup.world = 3;
  setup.num_cached = 3;
  for (const bool replicated : {false, true}) {
    setup.replicated_queries = replicated;
    DcpCase even(setup, 1), odd(setup, 2);
    run_ranks_on_gpus(setup.world, [&](EnqueuedGroup& group, const Context& context) {
      RankStep step(even, group, context, peer_config(even));
      DeviceRank other(odd, group.rank());
      other.load(odd);
      const DcpPlan plan = step.attention.plan(even.batch(), step.stream.get());
      const Workspace workspace = step.workspace(plan);
      group.meet();
      for (int32_t layer = 0; layer < 8; ++layer) {
        if (layer == 2 * group.rank()) std::this_thread::sleep_for(milliseconds(20));
        const DcpArgs& args = layer % 2 == 0 ? step.memory.args() : other.args();
        step.attention.run(plan, args, workspace, step.stream.get());
      }
      step.stream.wait();
      group.meet();
      step.memory.store(even, step.attention);
      other.store(odd, step.attention);
      EXPECT_NO_THROW(step.attention.check());
      group.meet();
    });
    EXPECT_EQ(even.wrong_outputs(), "");
    EXPECT_EQ(odd.wrong_outputs(), "");
  }
}

TEST_F(DcpPeersOnGpu, WhatIsChosen) {
  DcpSetup setup = small_setup();
  setup.num_cached = 3;
  DcpCase whole(setup);
  setup.heads = 32;
  setup.dim_v = 256;
  setup.requests = {{600, 550}};
  setup.num_cached = 1;
  DcpCase large(setup);
  setup.partial = DType::kBFloat16;
  DcpCase halved(setup);
  const auto chosen = [&](const DcpCase& given, DcpTransport transport, bool bounds) {
    std::vector<int32_t> over_peers(2, -1);
    run_ranks_on_gpus(2, [&](EnqueuedGroup& group, const Context& context) {
      DcpConfig config = given.config();
      config.transport = transport;
      if (bounds) config.bounds = GraphBounds{4, 640, 600, 640, 0};
      DcpAttention attention(context, group, config);
      group.meet();
      over_peers[static_cast<size_t>(group.rank())] = attention.plan(given.batch()).over_peer_memory ? 1 : 0;
      group.meet();
    });
    EXPECT_EQ(over_peers[0], over_peers[1]);
    return over_peers[0] == 1;
  };
  for (const bool bounds : {false, true}) {
    EXPECT_EQ(chosen(whole, DcpTransport::kAuto, bounds), has_two()) << "ranks of one GPU are forced or not at all";
    EXPECT_FALSE(chosen(large, DcpTransport::kAuto, bounds)) << "more than " << kMostAutoPeerBytes << " bytes";
    EXPECT_EQ(chosen(halved, DcpTransport::kAuto, bounds), has_two()) << "half as many";
    EXPECT_FALSE(chosen(whole, DcpTransport::kGroup, bounds));
    EXPECT_TRUE(chosen(whole, DcpTransport::kPeer, bounds));
    EXPECT_TRUE(chosen(large, DcpTransport::kPeer, bounds));
  }
}

/// One rank does not run. The others wait once, however many layers they have enqueued, and all ranks are told.
TEST_F(DcpPeersOnGpu, ARankThatStaysAwayIsNamedOnEveryRank) {
  constexpr milliseconds kTimeout(700);
  for (const bool replicated : {false, true}) {
    for (const bool captured : {false, true}) {
      DcpSetup setup = small_setup();
      setup.world = 3;
      setup.num_cached = 3;
      setup.replicated_queries = replicated;
      DcpCase whole(setup);
      run_ranks_on_gpus(
          setup.world,
          [&](EnqueuedGroup& group, const Context& context) {
            DcpConfig config = peer_config(whole);
            config.bounds = kBounds;
            RankStep step(whole, group, context, config);
            const DcpPlan plan = step.attention.plan(whole.batch(), step.stream.get());
            const Workspace workspace = step.workspace(plan);
            const auto run_layers = [&] {
              for (int32_t layer = 0; layer < 12; ++layer) {
                step.attention.run(plan, step.memory.args(), workspace, step.stream.get());
              }
            };
            std::unique_ptr<CapturedGraph> graph;
            if (captured) graph = std::make_unique<CapturedGraph>(step.stream, run_layers);
            group.meet();
            const auto begin = steady_clock::now();
            if (group.rank() == 1) {
              std::this_thread::sleep_for(2 * kTimeout);
            }
            if (captured) {
              graph->launch(step.stream);
            } else if (group.rank() != 1) {
              run_layers();
            }
            step.stream.wait();
            EXPECT_LT(steady_clock::now() - begin, 8 * kTimeout) << "each layer waited";
            const auto named = [&](const std::function<void()>& call) {
              expect_error(ErrorCode::kUnavailable, "rank 1 of the group did not come", call);
            };
            if (group.rank() != 1 || captured) {
              named([&] { step.attention.check(); });
              named([&] { step.attention.check(); });
              named([&] { step.attention.run(plan, step.memory.args(), workspace, step.stream.get()); });
              named([&] { step.attention.plan(whole.batch(), step.stream.get()); });
              step.memory.store(whole, step.attention);
              const auto& lse = whole.ranks[static_cast<size_t>(group.rank())].lse;
              for (size_t i = 0; i < static_cast<size_t>(whole.tokens() * setup.heads); ++i) {
                EXPECT_TRUE(std::isnan(lse[i])) << i;
              }
            } else {
              expect_error(ErrorCode::kUnavailable, "rank 1 of the group did not come",
                           [&] { step.attention.plan(whole.batch(), step.stream.get()); });
            }
          },
          kTimeout);
    }
  }
}

/// One rank's page table is refused once its queries have been sent. The others do not take what it would send next for
/// the partial results that they wait for, and need not wait out their time.
TEST_F(DcpPeersOnGpu, ARankThatThrowsBetweenTwoExchangesIsNamedOnEveryRank) {
  constexpr milliseconds kTimeout(20000);
  const TableChecks checks(true);
  for (const bool replicated : {false, true}) {
    DcpSetup setup = small_setup();
    setup.world = 3;
    setup.num_cached = 3;
    setup.replicated_queries = replicated;
    DcpCase whole(setup);
    const auto begin = steady_clock::now();
    run_ranks_on_gpus(
        setup.world,
        [&](EnqueuedGroup& group, const Context& context) {
          RankStep step(whole, group, context, peer_config(whole));
          const DcpPlan plan = step.attention.plan(whole.batch(), step.stream.get());
          const Workspace workspace = step.workspace(plan);
          const auto run = [&] { step.attention.run(plan, step.memory.args(), workspace, step.stream.get()); };
          const auto named = [&](const std::function<void()>& call) {
            expect_error(ErrorCode::kUnavailable, "rank 1 of the group threw while it enqueued a layer", call);
          };
          group.meet();
          if (group.rank() == 1) {
            DcpArgs& args = step.memory.args();
            const int64_t pages = args.cache.num_pages;
            args.cache.num_pages = 1;  // the pages that the table names are beyond it
            expect_error(ErrorCode::kInvalidArgument, "", run);
            args.cache.num_pages = pages;
            named(run);
          } else {
            run();
            step.stream.wait();
            named(run);
            step.memory.store(whole, step.attention);
            for (int32_t i = 0; i < whole.tokens() * setup.heads; ++i) {
              EXPECT_TRUE(std::isnan(whole.ranks[static_cast<size_t>(group.rank())].lse[static_cast<size_t>(i)])) << i;
            }
          }
          named([&] { step.attention.check(); });
          named([&] { step.attention.plan(whole.batch(), step.stream.get()); });
        },
        kTimeout);
    EXPECT_LT(steady_clock::now() - begin, kTimeout) << "the others waited";
  }
}

/// A rank that is late, but within the time, is waited for.
TEST_F(DcpPeersOnGpu, ALateRankIsWaitedFor) {
  DcpCase whole(small_setup());
  run_ranks_on_gpus(2, [&](EnqueuedGroup& group, const Context& context) {
    RankStep step(whole, group, context, peer_config(whole));
    const DcpPlan plan = step.attention.plan(whole.batch(), step.stream.get());
    const Workspace workspace = step.workspace(plan);
    group.meet();
    if (group.rank() == 1) std::this_thread::sleep_for(milliseconds(300));
    step.attention.run(plan, step.memory.args(), workspace, step.stream.get());
    step.stream.wait();
    group.meet();
    step.memory.store(whole, step.attention);
    EXPECT_NO_THROW(step.attention.check());
    group.meet();
  });
  EXPECT_EQ(whole.wrong_outputs(), "");
}

#if defined(FOLIO_EMULATED_CUDA)
size_t free_bytes() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total));
  return free;
}

/// A rank throws where the others wait for it, or none has memory.
TEST_F(DcpPeersOnGpu, NothingIsLeaked) {
  DcpCase whole(small_setup());
  const size_t before = free_bytes();
  const auto leave_early = [&] {
    run_ranks_on_gpus(
        2,
        [&](EnqueuedGroup& group, const Context& context) {
          RankStep step(whole, group, context, peer_config(whole));
          const DcpPlan plan = step.attention.plan(whole.batch(), step.stream.get());
          const Workspace workspace = step.workspace(plan);
          group.meet();
          if (group.rank() == 1) throw std::runtime_error("thrown by the test");
          step.attention.run(plan, step.memory.args(), workspace, step.stream.get());
        },
        milliseconds(200));
  };
  EXPECT_THROW(leave_early(), std::runtime_error);
  EXPECT_EQ(free_bytes(), before);
  setenv("FOLIO_EMULATED_MOST_BYTES", "1048576", 1);
  run_ranks_on_gpus(2, [&](EnqueuedGroup& group, const Context& context) {
    DcpAttention attention(context, group, peer_config(whole));
    expect_error(ErrorCode::kUnsupported,
                 "transport is peer, and there is no peer memory: rank 0 has no memory for it: 2097152 bytes",
                 [&] { attention.plan(whole.batch()); });
    DcpConfig automatic = whole.config();
    DcpAttention other(context, group, automatic);
    EXPECT_FALSE(other.plan(whole.batch()).over_peer_memory);
    group.meet();
  });
  unsetenv("FOLIO_EMULATED_MOST_BYTES");
  EXPECT_EQ(free_bytes(), before);
}
#endif

/// The first rank throws away its attention, or its whole life, before the others have: nobody stores to freed memory.
TEST_F(DcpPeersOnGpu, RanksEndInAnyOrder) {
  DcpCase whole(small_setup());
  for (const int32_t first : {0, 1}) {
    run_ranks_on_gpus(2, [&](EnqueuedGroup& group, const Context& context) {
      auto step = std::make_unique<RankStep>(whole, group, context, peer_config(whole));
      const DcpPlan plan = step->attention.plan(whole.batch(), step->stream.get());
      const Workspace workspace = step->workspace(plan);
      group.meet();
      step->attention.run(plan, step->memory.args(), workspace, step->stream.get());
      if (group.rank() == first) {
        step->stream.wait();
        step = nullptr;
        group.meet();
      } else {
        group.meet();
        step->stream.wait();
        EXPECT_NO_THROW(step->attention.check());
      }
    });
  }
}

TEST_F(DcpPeersOnGpu, ForcedPeerMemoryThatCannotBeHadIsRefusedOnEveryRank) {
  DcpCase whole(small_setup());
  DcpConfig config = peer_config(whole);
  run_ranks(1, [&](ProcessGroup& group) {
    expect_error(ErrorCode::kUnsupported, "transport is peer, which is for GPUs",
                 [&] { DcpAttention(Context::cpu(), group, config); });
  });
  const auto refused = [&](int32_t world, const char* text) {
    for (const bool bounds : {false, true}) {
      run_ranks_on_gpus(world, [&](EnqueuedGroup& group, const Context& context) {
        DcpConfig given = config;
        if (bounds) given.bounds = kBounds;
        const auto call = [&] {
          DcpAttention attention(context, group, given);
          attention.plan(whole.batch());
        };
        expect_error(ErrorCode::kUnsupported, text, call);
        group.meet();
      });
    }
  };
  refused(9, "the group has 9 ranks, more than 8");
#if defined(FOLIO_EMULATED_CUDA)
  if (!has_two()) return;
  setenv("FOLIO_EMULATED_PEER_ACCESS", "0", 1);
  refused(2, "cannot reach the memory of rank");
  config.transport = DcpTransport::kAuto;
  run_ranks_on_gpus(2, [&](EnqueuedGroup& group, const Context& context) {
    DcpAttention attention(context, group, config);
    EXPECT_FALSE(attention.plan(whole.batch()).over_peer_memory);
    group.meet();
  });
  unsetenv("FOLIO_EMULATED_PEER_ACCESS");
#endif
}

}  // namespace
}  // namespace folio::distributed::testing
