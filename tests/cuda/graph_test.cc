#include <algorithm>
#include <tuple>

#include "folio/verify.hpp"
#include "serving_step.hpp"

namespace folio::cuda_test {
namespace {

/// A graph of one step: plan from device lengths, cache writes, attention.
class StepGraph {
 public:
  StepGraph(ServingStep& step, PlanBuffer& buffer, const TestStream& stream) {
    check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal));
    step.enqueue(buffer, nullptr, stream.get());
    finish(stream);
  }
  /// The layers alone, beside a plan that the host makes before every launch.
  StepGraph(ServingStep& step, const AttentionPlan& plan, const TestStream& stream) {
    check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal));
    step.run_layers(plan, stream.get());
    finish(stream);
  }
  ~StepGraph() { static_cast<void>(cudaGraphExecDestroy(executable_)); }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;
  void launch(const TestStream& stream) const { check(cudaGraphLaunch(executable_, stream.native())); }

 private:
  void finish(const TestStream& stream) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream.native(), &graph));
    check(cudaGraphInstantiate(&executable_, graph, 0));
    check(cudaGraphDestroy(graph));
  }

  cudaGraphExec_t executable_ = nullptr;
};

/// The level of determinism and the kernel that is forced.
using GraphCase = std::tuple<Determinism, std::string>;
/// The kind of batch, and the kernel.
using KindCase = std::tuple<StepKind, std::string>;

bool runs_here(const std::string& kernel) {
  const std::vector<std::string> all = verify::runnable_kernels(Context::cuda(0));
  return std::count(all.begin(), all.end(), kernel) > 0;
}

class Graph : public CudaTest, public testing::WithParamInterface<GraphCase> {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && !runs_here(kernel())) GTEST_SKIP() << kernel() << " does not run on this GPU";
  }
  static Determinism level() { return std::get<0>(GetParam()); }
  static std::string kernel() { return std::get<1>(GetParam()); }
};

/// Captured once; replayed with other lengths, tables and numbers of requests: the bits of an eager step, which is
/// planned on the host.
void expect_replays_equal_eager_steps(Determinism determinism, const std::string& kernel, int replays,
                                      StepKind kind = StepKind::kAny) {
  ServingStep step(determinism, kernel);
  PlanBuffer graph_buffer = make_plan_buffer(step.op());
  PlanBuffer eager_buffer = make_plan_buffer(step.op());
  const TestStream stream;
  std::mt19937 random(7);
  step.set(ServingStep::random_lengths(random, kind), random);
  const StepGraph graph(step, graph_buffer, stream);
  for (int i = 0; i < replays; ++i) {
    const StepLengths lengths = ServingStep::random_lengths(random, kind);
    step.set(lengths, random);
    step.clear_output();
    graph.launch(stream);
    stream.wait();
    const ServingStep::Output replayed = step.output();
    step.clear_output();
    step.enqueue(eager_buffer, &lengths, stream.get());
    stream.wait();
    ASSERT_TRUE(replayed == step.output()) << "replay " << i;
  }
}

TEST_P(Graph, AThousandReplaysEqualEagerSteps) {
  expect_replays_equal_eager_steps(level(), kernel(), repeats(1000));
}

class GraphKind : public CudaTest, public testing::WithParamInterface<KindCase> {};

/// Each kind of batch for itself. Shared prefixes and drafts are replayed as often behind the backends, which plan them
/// on the host (backends_test.cc, token_pool_test.cc).
TEST_P(GraphKind, AThousandReplaysEqualEagerSteps) {
  const auto& [kind, kernel] = GetParam();
  if (!runs_here(kernel)) GTEST_SKIP() << kernel << " does not run on this GPU";
  expect_replays_equal_eager_steps(Determinism::kRunToRun, kernel, repeats(1000), kind);
}

std::string kind_name(const testing::TestParamInfo<KindCase>& of) {
  static const char* const names[] = {"Any", "Decode", "SeveralTokens", "Prefill", "Mixed"};
  return names[static_cast<size_t>(std::get<0>(of.param))] +
         std::string(std::get<1>(of.param) == "cuda-sm80" ? "" : "Sm90Decode");
}

INSTANTIATE_TEST_SUITE_P(Kinds, GraphKind,
                         testing::Combine(testing::Values(StepKind::kDecode, StepKind::kSeveralTokens,
                                                          StepKind::kPrefill, StepKind::kMixed),
                                          testing::Values("cuda-sm80", "cuda-sm90-decode")),
                         kind_name);

/// Few enough to be watched by compute-sanitizer.
TEST_P(Graph, AFewReplaysEqualEagerSteps) {
  expect_replays_equal_eager_steps(level(), kernel(), 8);
}

/// What is captured beside a plan from the host's lengths, in which nothing was split, has to merge what later plans
/// split, in a workspace with room for it.
TEST_P(Graph, LayersBesideHostPlansAreReplayedWithLaterOnes) {
  ServingStep step(level(), kernel());
  PlanBuffer graph_buffer = make_plan_buffer(step.op());
  PlanBuffer eager_buffer = make_plan_buffer(step.op());
  const TestStream stream;
  std::mt19937 random(19);
  StepLengths smallest{std::vector<int32_t>(ServingStep::kRequests + 1, 1),
                       std::vector<int32_t>(ServingStep::kRequests)};
  smallest.cu_q[0] = 0;
  smallest.kv_len[0] = 1;
  step.set(smallest, random);
  const AttentionPlan first = step.enqueue(graph_buffer, &smallest, stream.get());
  ASSERT_EQ(summary(first).num_combine_tiles, 0);
  const StepGraph graph(step, first, stream);
  int32_t merges = 0;
  for (int i = 0; i < 20; ++i) {
    const StepLengths lengths = ServingStep::random_lengths(random);
    step.set(lengths, random);
    step.clear_output();
    step.enqueue(eager_buffer, &lengths, stream.get());
    stream.wait();
    const ServingStep::Output eager = step.output();
    step.clear_output();
    merges += summary(step.plan(graph_buffer, lengths, stream.get())).num_combine_tiles;
    graph.launch(stream);
    stream.wait();
    ASSERT_TRUE(eager == step.output()) << "replay " << i;
  }
  if (level() == Determinism::kRunToRun) {  // above it only longer requests than these are split
    EXPECT_GT(merges, 0);
  }
}

/// Where batches may have shared segments, what is split is merged by a second kernel; elsewhere cuda-sm80 merges
/// itself, in whichever CTA is the last. Same plans, same bits.
TEST_P(Graph, MergesOfASecondKernelAreTheSame) {
  ServingStep alone(level(), kernel());
  ServingStep with_levels(level(), kernel(), 1);
  PlanBuffer buffer = make_plan_buffer(alone.op());
  PlanBuffer buffer_with_levels = make_plan_buffer(with_levels.op());
  const TestStream stream;
  std::mt19937 random(23);
  int32_t merges = 0;
  for (int i = 0; i < 40; ++i) {
    const StepLengths lengths = ServingStep::random_lengths(random);
    std::mt19937 same = random;
    alone.set(lengths, random);
    with_levels.set(lengths, same);
    alone.clear_output();
    with_levels.clear_output();
    merges += summary(alone.enqueue(buffer, &lengths, stream.get())).num_combine_tiles;
    with_levels.enqueue(buffer_with_levels, &lengths, stream.get());
    stream.wait();
    ASSERT_TRUE(alone.output() == with_levels.output()) << "step " << i;
  }
  if (level() == Determinism::kRunToRun) {
    EXPECT_GT(merges, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Graph,
                         testing::Combine(testing::Values(Determinism::kRunToRun, Determinism::kScheduleInvariant),
                                          testing::Values("cuda-sm80", "cuda-sm90-decode", "cuda-sm90")),
                         [](const auto& of) {
                           const std::string level =
                               std::get<0>(of.param) == Determinism::kRunToRun ? "RunToRun" : "ScheduleInvariant";
                           const std::string& kernel = std::get<1>(of.param);
                           return level + (kernel == "cuda-sm80" ? "" : kernel == "cuda-sm90" ? "Sm90" : "Sm90Decode");
                         });

TEST_F(CudaTest, HostLengthsAreNotCaptured) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  const TestStream stream;
  std::mt19937 random(3);
  const StepLengths lengths = ServingStep::random_lengths(random);
  step.set(lengths, random);
  check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal));
  EXPECT_THROW(step.enqueue(buffer, &lengths, stream.get()), Error);
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream.native(), &graph));
  check(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace folio::cuda_test
