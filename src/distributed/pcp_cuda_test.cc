// Attention over divided queries on a GPU, every rank with a stream of its own.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "distributed/device_memory_test_util.hpp"
#include "distributed/enqueued_group_test_util.hpp"
#include "distributed/pcp_case_test_util.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

namespace folio::distributed::testing {
namespace {

using ::testing::HasSubstr;

using cuda_test::CapturedGraph;
using cuda_test::check;
using cuda_test::TestStream;

void copy_in(const void* to, const void* from, size_t bytes) {
  if (bytes > 0) check(cudaMemcpy(const_cast<void*>(to), from, bytes, cudaMemcpyHostToDevice));
}

template <typename T>
void copy_in(const void* to, const std::vector<T>& from) {
  copy_in(to, from.data(), from.size() * sizeof(T));
}

/// One rank's arguments in memory of the device that holds the case it was made for, and smaller ones of as many rows.
class RankOnDevice {
 public:
  RankOnDevice(PcpCase& most, int32_t rank) : rank_(static_cast<size_t>(rank)) {
    args = most.args(rank);
    const PcpCase::Rank& own = most.ranks[rank_];
    const DcpCase::Rank& shared = most.whole.ranks[rank_];
    columns_ = shared.columns;
    args.q.data = take(own.q);
    args.k.data = take(own.k);
    args.v.data = take(own.v);
    auto* const cache = static_cast<std::byte*>(take(shared.cache));
    args.cache.v = cache + (static_cast<std::byte*>(args.cache.v) - static_cast<std::byte*>(args.cache.k));
    args.cache.k = cache;
    args.table.indices = static_cast<const int32_t*>(take(shared.table));
    const DcpCase::Rank& first = most.whole.ranks[0];
    if (args.alibi_slopes != nullptr) args.alibi_slopes = static_cast<const float*>(take(first.slopes));
    if (args.sinks != nullptr) args.sinks = static_cast<const float*>(take(first.sinks));
    if (args.q_scale.data != nullptr) args.q_scale.data = static_cast<const float*>(take(most.whole.setup.q_scales));
    args.out.data = take(own.out);
    args.lse.data = static_cast<float*>(take(own.lse));
    load(most);
  }

  void load(PcpCase& divided) {
    const PcpArgs host = divided.args(static_cast<int32_t>(rank_));
    const PcpCase::Rank& own = divided.ranks[rank_];
    const DcpCase::Rank& shared = divided.whole.ranks[rank_];
    copy_in(args.q.data, own.q);
    copy_in(args.k.data, own.k);
    copy_in(args.v.data, own.v);
    const auto half =
        static_cast<size_t>(static_cast<std::byte*>(host.cache.v) - static_cast<std::byte*>(host.cache.k));
    copy_in(args.cache.k, shared.cache.data(), half);
    copy_in(args.cache.v, shared.cache.data() + half, shared.cache.size() - half);
    for (size_t r = 0; r < divided.whole.setup.requests.size(); ++r) {
      const auto columns = static_cast<size_t>(shared.columns);
      copy_in(args.table.indices + r * static_cast<size_t>(columns_), shared.table.data() + r * columns,
              columns * sizeof(int32_t));
    }
    const DcpCase::Rank& first = divided.whole.ranks[0];
    if (args.alibi_slopes != nullptr) copy_in(args.alibi_slopes, first.slopes);
    if (args.sinks != nullptr) copy_in(args.sinks, first.sinks);
    if (args.q_scale.data != nullptr) copy_in(args.q_scale.data, divided.whole.setup.q_scales);
    copy_in(args.out.data, own.out);
    copy_in(args.lse.data, own.lse);
    check(cudaStreamSynchronize(nullptr));
  }

  Workspace workspace(size_t bytes) {
    memory_.push_back(std::make_unique<DeviceMemory>(bytes));
    return memory_.back()->workspace();
  }

  void take_results(PcpCase& divided) const {
    PcpCase::Rank& own = divided.ranks[rank_];
    check(cudaMemcpy(own.out.data(), args.out.data, own.out.size(), cudaMemcpyDeviceToHost));
    check(cudaMemcpy(own.lse.data(), args.lse.data, own.lse.size() * sizeof(float), cudaMemcpyDeviceToHost));
  }

  PcpArgs args;

 private:
  template <typename T>
  void* take(const std::vector<T>& values) {
    memory_.push_back(std::make_unique<DeviceMemory>(values.size() * sizeof(T)));
    return memory_.back()->data();
  }

  size_t rank_;
  int32_t columns_ = 0;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

ThreadGroupOptions on_gpu() {
  ThreadGroupOptions options;
  options.context = Context::cuda(0);
  return options;
}

void run_on_gpu(PcpCase& divided) {
  run_ranks(
      divided.world(),
      [&](ProcessGroup& group) {
        const Context context = Context::cuda(0);
        const TestStream own;
        const Stream stream = own.get();
        PcpAttention attention(context, group, divided.config());
        RankOnDevice rank(divided, group.rank());
        const PcpPlan first = attention.plan(divided.batch(), stream);
        const Workspace workspace = rank.workspace(attention.workspace_size(first));
        attention.run(first, rank.args, workspace, stream);
        // A plan of the next step while the last one's layers may wait on the stream.
        attention.run(attention.plan(divided.batch(), stream), rank.args, workspace, stream);
        synchronize(context, stream);
        rank.take_results(divided);
        if (group.rank() == 0) divided.whole.ranks[0].p_dtype = attention.fresh_op().p_dtype();
      },
      on_gpu());
}

std::vector<PcpSetup> gpu_setups() {
  PcpSetup plain;
  plain.whole.requests = {{5, 1}, {70, 4}, {133, 70}, {1, 1}, {100, 17}, {40, 0}};
  plain.whole.heads = 4;
  plain.whole.dim_qk = plain.whole.dim_v = 64;
  plain.whole.model = plain.whole.cache = DType::kBFloat16;
  plain.whole.interleave = 4;
  std::vector<PcpSetup> setups;
  const auto add = [&](const char* name, auto change) {
    setups.push_back(plain);
    setups.back().whole.name = name;
    change(setups.back().whole);
  };
  add("plain", [](DcpSetup&) {});
  add("three ranks, a window", [](DcpSetup& s) { s.world = 3, s.window_left = 40, s.hnd = true; });
  // Reading begins with the sixth page of each rank's row.
  add("a window behind whole pages", [](DcpSetup& s) { s.window_left = 40, s.requests = {{70, 4}, {400, 20}}; });
  add("ALiBi, sinks, soft cap", [](DcpSetup& s) { s.alibi = s.sinks = true, s.soft_cap = 2.0f; });
  add("e4m3", [](DcpSetup& s) { s.cache = DType::kFloat8E4M3, s.k_scale = 0.5f, s.v_scale = 2.0f; });
  add("new requests only", [](DcpSetup& s) { s.requests = {{3, 3}, {77, 77}}; });
  return setups;
}

class PcpAttentionOnAGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }
};

TEST_F(PcpAttentionOnAGpu, EqualsTheUndividedBatch) {
  for (PcpSetup setup : gpu_setups()) {
    for (const PcpExchange exchange : {PcpExchange::kPassQ, PcpExchange::kPassKv}) {
      setup.exchange = exchange;
      PcpCase divided(setup);
      run_on_gpu(divided);
      EXPECT_EQ(divided.wrong_outputs(), "");
    }
  }
}

TEST_F(PcpAttentionOnAGpu, PlansCompareTheBatches) {
  PcpSetup setup = gpu_setups()[0], other = setup;
  other.whole.requests[1].seq_len = 71;
  run_ranks(
      2,
      [&](ProcessGroup& group) {
        PcpCase divided(group.rank() == 0 ? setup : other);
        PcpAttention attention(Context::cuda(0), group, divided.config());
        try {
          attention.plan(divided.batch());
          ADD_FAILURE() << "did not throw";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
          EXPECT_THAT(error.what(), HasSubstr("runs another batch or configuration than rank"));
        }
      },
      on_gpu());
}

TEST_F(PcpAttentionOnAGpu, RefusesWhatItsKernelsDoNotTake) {
  PcpSetup setup = gpu_setups()[0];
  setup.whole.world = 9;
  setup.exchange = PcpExchange::kPassKv;
  const auto groups = make_thread_groups(9, on_gpu());
  try {
    PcpAttention(Context::cuda(0), *groups[0], PcpCase(setup).config());
    ADD_FAILURE() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), HasSubstr("kPassKv over 9 ranks"));
  }
}

/// Batches of as many requests, the first of which holds any of the others.
std::vector<std::vector<RequestLengths>> replayed_lengths() {
  return {{{140, 70}, {140, 70}, {140, 70}},
          {{5, 1}, {133, 40}, {100, 17}},
          {{3, 3}, {64, 64}, {1, 1}},
          {{140, 1}, {0, 0}, {129, 2}},
          {{140, 70}, {131, 60}, {12, 9}}};
}

std::vector<PcpSetup> captured_setups() {
  PcpSetup plain = gpu_setups()[0];
  plain.bounds = GraphBounds{3, 210, 70, 140, 0};
  plain.max_tokens = 110;
  std::vector<PcpSetup> setups(4, plain);
  setups[1].whole.name = "four ranks, a window, HND";
  setups[1].whole.world = 4, setups[1].whole.window_left = 40, setups[1].whole.hnd = true;
  setups[1].max_tokens = 58;
  setups[2].whole.name = "ALiBi, sinks, soft cap";
  setups[2].whole.alibi = setups[2].whole.sinks = true, setups[2].whole.soft_cap = 2.0f;
  setups[3].whole.name = "e4m3";
  setups[3].whole.cache = DType::kFloat8E4M3, setups[3].whole.k_scale = 0.5f, setups[3].whole.v_scale = 2.0f;
  return setups;
}

/// One capture of `run` serves the later plans of as many requests, with or without older tokens.
TEST_F(PcpAttentionOnAGpu, CapturedRunsServeLaterPlans) {
  if (const std::string why = why_no_enqueued_ranks(2); !why.empty()) GTEST_SKIP() << why;
  for (PcpSetup setup : captured_setups()) {
    if (!why_no_enqueued_ranks(setup.whole.world).empty()) continue;
    std::vector<PcpCase> cases;
    for (const auto& lengths : replayed_lengths()) {
      setup.whole.requests = lengths;
      cases.emplace_back(setup, static_cast<uint32_t>(cases.size()) + 1);
    }
    run_enqueued_ranks(setup.whole.world, [&](EnqueuedGroup& group) {
      const TestStream stream;
      PcpAttention attention(group.context(), group, cases[0].config());
      RankOnDevice rank(cases[0], group.rank());
      const Workspace workspace = rank.workspace(attention.workspace_size());
      group.meet();  // allocating waits for the whole device
      // Captured is a step of few tokens, so that others have more of everything.
      const PcpPlan captured = attention.plan(cases[2].batch(), stream.get());
      EXPECT_EQ(captured.max_tokens, setup.max_tokens);
      EXPECT_EQ(captured.exchange, PcpExchange::kPassQ);
      EXPECT_LE(attention.workspace_size(captured), workspace.bytes);
      const CapturedGraph graph(stream, [&] { attention.run(captured, rank.args, workspace, stream.get()); });
      for (PcpCase& divided : cases) {
        group.meet();
        rank.load(divided);
        static_cast<void>(attention.plan(divided.batch(), stream.get()));
        graph.launch(stream);
        stream.wait();
        group.meet();
        rank.take_results(divided);
        if (group.rank() == 0) divided.whole.ranks[0].p_dtype = attention.fresh_op().p_dtype();
      }
      group.meet();
    });
    for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(cases[i].wrong_outputs(), "") << "batch " << i;
  }
}

TEST_F(PcpAttentionOnAGpu, CapturesNeedBounds) {
  if (const std::string why = why_no_enqueued_ranks(2); !why.empty()) GTEST_SKIP() << why;
  PcpCase divided(gpu_setups()[0]);
  run_enqueued_ranks(2, [&](EnqueuedGroup& group) {
    const TestStream stream;
    PcpAttention attention(group.context(), group, divided.config());
    RankOnDevice rank(divided, group.rank());
    const PcpPlan plan = attention.plan(divided.batch(), stream.get());
    const Workspace workspace = rank.workspace(attention.workspace_size(plan));
    group.meet();
    const CapturedGraph nothing(stream, [&] {
      try {
        attention.run(plan, rank.args, workspace, stream.get());
        ADD_FAILURE() << "did not throw";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        EXPECT_THAT(error.what(), HasSubstr("graphs need PcpConfig::bounds"));
      }
    });
    group.meet();
  });
}

}  // namespace
}  // namespace folio::distributed::testing
