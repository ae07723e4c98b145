// Attention over a divided cache on a GPU whose group's operations are enqueued: steps in which the host waits for
// nothing, steps in graphs, and how ranks find on the device that they differ.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "distributed/dcp_steps_test_util.hpp"

namespace folio::distributed::testing {
namespace {

class DcpStepsOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_enqueued_ranks(2); !why.empty()) GTEST_SKIP() << why;
  }
};

std::vector<DcpSetup> setups() {
  std::vector<DcpSetup> all;
  const auto add = [&](const char* name, auto change) {
    all.push_back(small_setup());
    all.back().name = name;
    change(all.back());
  };
  add("plain", [](DcpSetup&) {});
  add("all to all, ALiBi", [](DcpSetup& s) { s.combine = DcpCombine::kAllToAll, s.alibi = true; });
  add("all cached, sinks", [](DcpSetup& s) { s.num_cached = 3, s.sinks = true; });
  add("replicated queries", [](DcpSetup& s) { s.replicated_queries = true, s.num_cached = 1; });
  add("a q scale per request and head", [](DcpSetup& s) {
    s.query = s.cache = DType::kFloat8E4M3, s.num_cached = 3;
    s.q_granularity = ScaleGranularity::kPerRequestAndHead, s.q_scales = {0.5f, 1.0f, 2.0f, 0.25f, 1.0f, 3.0f};
  });
  add("cross attention", [](DcpSetup& s) {
    s.cross = true, s.mask = MaskKind::kNone, s.num_cached = 3, s.requests = {{37, 1}, {3, 5}, {0, 2}};
  });
  add("bfloat16 partial results", [](DcpSetup& s) { s.partial = DType::kBFloat16, s.num_cached = 1; });
  add("bfloat16 partial results of all heads", [](DcpSetup& s) {
    s.partial = DType::kBFloat16, s.replicated_queries = s.all_heads_out = true, s.num_cached = 3;
  });
  return all;
}

TEST_F(DcpStepsOnGpu, RunWaitsForNothing) {
  for (const DcpSetup& setup : setups()) {
    DcpCase whole(setup);
    DcpConfig config = whole.config();
    config.transport = DcpTransport::kGroup;
    run_enqueued_ranks(setup.world, [&](EnqueuedGroup& group) {
      RankStep step(whole, group, group.context(), config);
      const DcpPlan plan = step.attention.plan(whole.batch(), step.stream.get());
      const Workspace workspace = step.workspace(plan);
      group.meet();  // allocating waits for the whole device
      Gate gate(step.stream);
      step.attention.run(plan, step.memory.args(), workspace, step.stream.get());
      EXPECT_TRUE(gate.open()) << setup.name << ": run waited for its stream";
      step.stream.wait();
      group.meet();
      step.memory.store(whole, step.attention);
      EXPECT_NO_THROW(step.attention.check());
      group.meet();
    });
    EXPECT_EQ(whole.wrong_outputs(), "") << setup.name;
  }
}

/// A case that has room for others, and those.
struct ReplayedCases {
  explicit ReplayedCases(const DcpSetup& setup) : room(with(setup, {{61, 9}, {61, 9}, {61, 14}})) {
    const bool cross = setup.cross;
    cases.emplace_back(setup, 5);
    cases.emplace_back(with(setup, cross ? Lengths{{0, 1}, {20, 3}, {5, 1}} : Lengths{{2, 1}, {20, 1}, {5, 5}}), 5);
    cases.emplace_back(with(setup, cross ? Lengths{{4, 9}, {61, 1}, {33, 3}} : Lengths{{61, 2}, {4, 1}, {16, 14}}), 5);
    // New requests only: a pass over the cache is in the graph all the same.
    if (!cross) cases.emplace_back(with(setup, {{1, 1}, {3, 3}, {5, 5}}), 5);
  }
  using Lengths = std::vector<RequestLengths>;
  static DcpSetup with(DcpSetup setup, const Lengths& requests) {
    setup.requests = requests;
    return setup;
  }
  DcpCase room;
  std::vector<DcpCase> cases;
};

constexpr DcpTransport kTransports[] = {DcpTransport::kGroup, DcpTransport::kPeer};

/// One layer, by `run` or in its two steps.
using Layer = void (*)(RankStep&, const DcpPlan&, Workspace);
void in_one(RankStep& step, const DcpPlan& plan, Workspace workspace) {
  step.attention.run(plan, step.memory.args(), workspace, step.stream.get());
}
void in_two(RankStep& step, const DcpPlan& plan, Workspace workspace) {
  step.attention.start(plan, step.memory.args(), workspace, step.stream.get());
  step.attention.finish(step.stream.get());
}

/// Captures with the lengths of one batch, and replays those of others: `plan` is in the graph, or before each replay.
void replay(const DcpSetup& setup, bool plan_in_graph, DcpTransport transport, Layer layer = in_one) {
  ReplayedCases all(setup);
  DcpConfig config = all.room.config();
  config.bounds = kBounds;
  config.transport = transport;
  run_enqueued_ranks(setup.world, [&](EnqueuedGroup& group) {
    RankStep step(all.room, group, group.context(), config);
    const Stream stream = step.stream.get();
    const DcpBatch batch = plan_in_graph ? step.memory.device_batch(all.room, all.room.tokens()) : all.room.batch();
    DcpPlan plan = step.attention.plan(batch, stream);
    const Workspace workspace = step.workspace(plan);
    step.stream.wait();  // the eager plan has read the lengths
    group.meet();
    const CapturedGraph graph(step.stream, [&] {
      if (plan_in_graph) plan = step.attention.plan(batch, stream);
      layer(step, plan, workspace);
    });
    for (DcpCase& given : all.cases) {
      step.memory.load(given);
      group.meet();
      if (!plan_in_graph) step.attention.plan(given.batch(), stream);
      graph.launch(step.stream);
      step.stream.wait();
      group.meet();
      step.memory.store(given, step.attention);
      EXPECT_NO_THROW(step.attention.check()) << setup.name;
      group.meet();
    }
  });
  for (const DcpCase& given : all.cases) EXPECT_EQ(given.wrong_outputs(), "") << setup.name;
}

TEST_F(DcpStepsOnGpu, GraphsPlanTheLengthsOfTheirReplay) {
  for (const DcpSetup& setup : setups()) {
    for (const DcpTransport transport : kTransports) replay(setup, /*plan_in_graph=*/true, transport);
  }
}

TEST_F(DcpStepsOnGpu, GraphsRunLaterPlansOfTheHost) {
  for (const DcpSetup& setup : setups()) {
    for (const DcpTransport transport : kTransports) replay(setup, /*plan_in_graph=*/false, transport);
  }
}

TEST_F(DcpStepsOnGpu, GraphsRunLayersInTwoSteps) {
  for (const DcpSetup& setup : setups()) {
    for (const DcpTransport transport : kTransports) replay(setup, /*plan_in_graph=*/false, transport, in_two);
  }
}

/// Rank 1 comes late. What rank 0 has enqueued behind `start` is done by then, and its results come with `finish`.
TEST_F(DcpStepsOnGpu, WorkBetweenStartAndFinishDoesNotWaitForOtherRanks) {
  for (const DcpTransport transport : kTransports) {
    for (const int32_t num_cached : {1, 3}) {  // with and without a pass over new tokens
      DcpSetup setup = small_setup();
      setup.replicated_queries = true;  // nothing is waited for before attention
      setup.num_cached = num_cached;
      DcpCase whole(setup);
      DcpConfig config = whole.config();
      config.transport = transport;
      run_enqueued_ranks(setup.world, [&](EnqueuedGroup& group) {
        RankStep step(whole, group, group.context(), config);
        const Stream stream = step.stream.get();
        const DcpPlan plan = step.attention.plan(whole.batch(), stream);
        const Workspace workspace = step.workspace(plan);
        DeviceMemory between(sizeof(int32_t));
        group.meet();
        if (group.rank() == 1) group.meet();  // rank 0 is through with what it does meanwhile
        step.attention.start(plan, step.memory.args(), workspace, stream);
        check(cudaMemsetAsync(between.data(), 0x11, sizeof(int32_t), step.stream.native()));
        if (group.rank() == 0) {
          step.stream.wait();
          group.meet();
        }
        expect_error(ErrorCode::kInvalidArgument, "was started and is not finished",
                     [&] { step.attention.plan(whole.batch(), stream); });
        step.attention.finish(stream);
        step.stream.wait();
        group.meet();
        step.memory.store(whole, step.attention);
        EXPECT_NO_THROW(step.attention.check());
        EXPECT_NO_THROW(step.attention.plan(whole.batch(), stream)) << "the layer is finished";
        group.meet();
      });
      EXPECT_EQ(whole.wrong_outputs(), "") << to_string(transport) << ", " << num_cached;
    }
  }
}

TEST_F(DcpStepsOnGpu, RanksOfOtherArgumentsAreReportedLater) {
  DcpSetup setup = setups()[4];
  setup.soft_cap = 2.0f;
  const auto reported = [&](const char* text, const std::function<void(DeviceRank&)>& change) {
    for (const DcpTransport transport : kTransports) {
      DcpCase whole(setup);
      DcpConfig config = whole.config();
      config.transport = transport;
      run_enqueued_ranks(setup.world, [&](EnqueuedGroup& group) {
        RankStep step(whole, group, group.context(), config);
        const DcpPlan plan = step.attention.plan(whole.batch(), step.stream.get());
        const Workspace workspace = step.workspace(plan);
        if (group.rank() == 1) change(step.memory);
        group.meet();
        step.attention.run(plan, step.memory.args(), workspace, step.stream.get());
        step.stream.wait();
        expect_error(ErrorCode::kInvalidArgument, text, [&] { step.attention.check(); });
        EXPECT_NO_THROW(step.attention.check()) << "said once";
        group.meet();
      });
    }
  };
  reported("an earlier run: sm_scale is ", [](DeviceRank& rank) { rank.args().sm_scale = 0.5f; });
  reported("an earlier run: logits_soft_cap is ", [](DeviceRank& rank) { rank.args().logits_soft_cap = 1.0f; });
  reported("an earlier run: q_scale is ", [](DeviceRank& rank) {
    rank.set_q_scales({0.75f, 1.0f, 2.0f, 0.25f, 1.0f, 3.0f});
  });
  reported("behind the first, which is 0.5 on both", [](DeviceRank& rank) {
    rank.set_q_scales({0.5f, 1.0f, 2.0f, 0.25f, 1.0f, 4.0f});
  });
}

TEST_F(DcpStepsOnGpu, RanksOfOtherLengthsOnTheDeviceAreReportedLater) {
  for (const bool replicated : {false, true}) {
    DcpSetup setup = small_setup();
    setup.replicated_queries = replicated;
    DcpCase whole(setup);
    DcpConfig config = whole.config();
    config.bounds = kBounds;
    run_enqueued_ranks(setup.world, [&](EnqueuedGroup& group) {
      RankStep step(whole, group, group.context(), config);
      if (group.rank() == 1) step.memory.set_seq_lens({37, 21, 9});
      group.meet();
      const DcpBatch batch = step.memory.device_batch(whole, whole.tokens());
      step.attention.plan(batch, step.stream.get());
      step.stream.wait();
      group.meet();
      expect_error(ErrorCode::kInvalidArgument, "an earlier plan from device lengths: rank ",
                   [&] { step.attention.check(); });
      step.memory.set_seq_lens({37, 70, 9});  // beyond the bounds
      group.meet();
      step.attention.plan(batch, step.stream.get());
      step.stream.wait();
      group.meet();
      expect_error(ErrorCode::kInvalidArgument, "request 1", [&] { step.attention.check(); });
      group.meet();
    });
  }
}

TEST_F(DcpStepsOnGpu, RanksOfOtherBatchesThrowAtPlan) {
  DcpSetup other = small_setup();
  other.requests[1].seq_len = 21;
  DcpCase first(small_setup()), second(other);
  run_enqueued_ranks(2, [&](EnqueuedGroup& group) {
    DcpCase& own = group.rank() == 0 ? first : second;
    RankStep step(own, group, group.context(), first.config());
    const std::string differs = core::message(
        "rank ", 1 - group.rank(), " of the group runs another batch or configuration than rank ", group.rank());
    expect_error(ErrorCode::kInvalidArgument, differs.c_str(),
                 [&] { step.attention.plan(own.batch(), step.stream.get()); });
    DcpBatch wrong = first.batch();
    if (group.rank() == 1) wrong.num_cached = 9;
    expect_error(ErrorCode::kInvalidArgument,
                 group.rank() == 1 ? "num_cached is 9" : "rank 1 of the group could not plan this step",
                 [&] { step.attention.plan(wrong, step.stream.get()); });
    EXPECT_NO_THROW(step.attention.plan(first.batch(), step.stream.get())) << "the group goes on";
    group.meet();
  });
}

TEST_F(DcpStepsOnGpu, RanksOfOtherBoundsThrowAtOnce) {
  const DcpCase whole(small_setup());
  run_enqueued_ranks(2, [&](EnqueuedGroup& group) {
    DcpConfig config = whole.config();
    config.bounds = kBounds;
    config.bounds->max_kv_len += group.rank();
    expect_error(ErrorCode::kInvalidArgument, "of the group has another configuration than rank",
                 [&] { DcpAttention(group.context(), group, config); });
    if (group.rank() == 1) config.interleave = 0;
    expect_error(ErrorCode::kInvalidArgument,
                 group.rank() == 1 ? "interleave is 0" : "rank 1 of the group could not prepare",
                 [&] { DcpAttention(group.context(), group, config); });
  });
}

/// A group that waits on the host cannot be captured, and says so before the capture is broken.
TEST_F(DcpStepsOnGpu, GraphsNeedAGroupThatEnqueues) {
  const Context context = Context::cuda(0);
  DcpCase whole(small_setup());
  ThreadGroupOptions options;
  options.context = context;
  run_ranks(
      2,
      [&](ProcessGroup& group) {
        DcpConfig config = whole.config();
        config.bounds = kBounds;
        DcpAttention attention(context, group, config);
        DeviceRank memory(whole, group.rank());
        const DcpPlan plan = attention.plan(whole.batch());
        DeviceMemory scratch(attention.workspace_size(plan));
        TestStream stream;
        group.barrier();
        check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal));
        expect_error(ErrorCode::kInvalidArgument, "ProcessGroup::enqueues",
                     [&] { attention.run(plan, memory.args(), scratch.workspace(), stream.get()); });
        expect_error(ErrorCode::kInvalidArgument, "ProcessGroup::enqueues",
                     [&] { attention.plan(memory.device_batch(whole, whole.tokens()), stream.get()); });
        cudaGraph_t graph = nullptr;
        check(cudaStreamEndCapture(stream.native(), &graph));
        check(cudaGraphDestroy(graph));
        group.barrier();
      },
      options);
}

TEST_F(DcpStepsOnGpu, LengthsOnTheDeviceNeedBoundsThatHoldThem) {
  const Context context = Context::cuda(0);
  DcpCase whole(small_setup());
  run_ranks(1, [&](ProcessGroup& group) {
    DeviceRank memory(whole, 0);
    DcpBatch batch = memory.device_batch(whole, whole.tokens());
    DcpAttention unbounded(context, group, whole.config());
    expect_error(ErrorCode::kInvalidArgument, "lengths on the device need DcpConfig::bounds",
                 [&] { unbounded.plan(batch); });
    DcpConfig config = whole.config();
    config.bounds = kBounds;
    DcpAttention attention(context, group, config);
    batch.num_tokens = kBounds.max_tokens + 1;
    expect_error(ErrorCode::kInvalidArgument, "it must be from 0 to the bounds' 32", [&] { attention.plan(batch); });
    batch.num_requests = batch.num_cached = kBounds.max_requests + 1;
    expect_error(ErrorCode::kInvalidArgument, "the bounds allow 4", [&] { attention.plan(batch); });
  });
}

}  // namespace
}  // namespace folio::distributed::testing
