// Both engine backends over a cache that is divided over threads on one GPU, against the float64 oracle over the whole
// one.
#include <gtest/gtest.h>

#include <tuple>

#include "core/error.hpp"
#include "dcp_setups.hpp"
#include "device_home.hpp"
#include "distributed/enqueued_group_test_util.hpp"

namespace folio::backends::testing {
namespace {

using Division = std::tuple<BackendKind, int32_t, int32_t, distributed::DcpCombine>;  ///< backend, world, interleave

class DcpBackendsOnGpu : public ::testing::TestWithParam<Division> {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }
};

distributed::ThreadGroupOptions group_options(const Context& context) {
  distributed::ThreadGroupOptions options;
  options.context = context;
  options.timeout = std::chrono::seconds(30);
  return options;
}

TEST_P(DcpBackendsOnGpu, EqualTheUndividedCache) {
  const auto [kind, world, interleave, combine] = GetParam();
  const Context context = Context::cuda(0);
  int32_t number = 0;
  std::vector<DcpSetup> setups = dcp_setups(world, interleave);
  if (kind == BackendKind::kFlashAttention) {
    for (DcpSetup& setup : cross_setups(world, interleave)) setups.push_back(std::move(setup));
  }
  for (DcpSetup setup : setups) {
    if (setup.model == DType::kFloat32) continue;  // which kernels of a GPU do not take
    if (setup.all_heads_out && combine == distributed::DcpCombine::kAllToAll) continue;  // leaves each its own
    setup = for_backend(setup, kind);
    setup.combine = combine;
    setup.hnd = number++ % 2 == 1;
    DcpCase whole(setup);
    distributed::run_ranks(
        world,
        [&, kind = kind](distributed::ProcessGroup& group) {
          DeviceHome home;
          run_backend(whole, kind, group, context, {}, &home);
        },
        group_options(context));
    EXPECT_EQ(whole.wrong_outputs(), "") << setup.name << (setup.hnd ? ", HND" : ", NHD");
  }
}

INSTANTIATE_TEST_SUITE_P(Divisions, DcpBackendsOnGpu,
                         ::testing::Combine(::testing::ValuesIn(kBackends), ::testing::Values(2, 4),
                                            ::testing::Values(1, 16),
                                            ::testing::Values(distributed::DcpCombine::kAllGatherReduceScatter,
                                                              distributed::DcpCombine::kAllToAll)),
                         [](const auto& test) {
                           return core::message(
                               std::get<0>(test.param) == BackendKind::kFlashInfer ? "FlashInfer" : "FlashAttention",
                               "_W", std::get<1>(test.param), "I", std::get<2>(test.param), "_",
                               distributed::to_string(std::get<3>(test.param)));
                         });

#if defined(FOLIO_EMULATED_CUDA)

/// Captures a step's layers and replays them.
class GraphHome final : public DeviceHome {
 public:
  explicit GraphHome(distributed::testing::EnqueuedGroup& group) : group_(group) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~GraphHome() override { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream stream() const override { return {stream_}; }
  void run_layers(const std::function<void()>& layers) override {
    group_.meet();
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    layers();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamEndCapture(stream_, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    for (int32_t replay = 0; replay < 2; ++replay) check(cudaGraphLaunch(executable, stream_));
    check(cudaStreamSynchronize(stream_));
    group_.meet();
    check(cudaGraphExecDestroy(executable));
    check(cudaGraphDestroy(graph));
  }

 private:
  distributed::testing::EnqueuedGroup& group_;
  cudaStream_t stream_ = nullptr;
};

/// Captured layers, over a group whose operations are enqueued, as NCCL's are.
TEST_P(DcpBackendsOnGpu, EqualTheUndividedCacheInGraphs) {
  const auto [kind, world, interleave, combine] = GetParam();
  const Context context = Context::cuda(0);
  DcpSetup plain;
  plain.world = world;
  plain.interleave = interleave;
  plain.combine = combine;
  plain.model = plain.cache = DType::kBFloat16;
  plain.requests = {{70, 1}, {33, 1}, {1, 1}, {65, 1}};
  DcpSetup mixed = plain;
  mixed.name = "mixed";
  mixed.sinks = mixed.alibi = mixed.replicated_queries = true;
  if (kind == BackendKind::kFlashAttention) mixed.requests = {{70, 1}, {33, 5}, {12, 12}};
  for (const DcpSetup& setup : {plain, mixed}) {
    DcpCase whole(for_backend(setup, kind));
    const auto graphs = [](EngineConfig& engine, CommonAttentionMetadata&) {
      engine.compilation.decode_graph_mode = DecodeGraphMode::kFull;
      engine.scheduler.max_num_seqs = 4;
      engine.scheduler.max_num_batched_tokens = 32;
      engine.model.max_model_len = 96;
    };
    FlashAttentionHooks hooks;
    hooks.options = [](FlashAttentionOptions& options) { options.steps_in_flight = 1; };
    const auto body = [&, kind = kind](distributed::testing::EnqueuedGroup& group) {
      GraphHome home(group);
      run_backend(whole, kind, group, context, graphs, &home, hooks);
    };
    distributed::testing::run_enqueued_ranks(world, context.device(), body);
    EXPECT_EQ(whole.wrong_outputs(), "") << setup.name;
  }
}

#endif

/// A group over the host's memory would be handed the device's addresses.
TEST(DcpBackendsOnGpuGroups, MustLieThereToo) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  const auto groups = distributed::make_thread_groups(2);
  DcpSetup setup;
  setup.model = setup.cache = DType::kBFloat16;
  setup.requests = {{5, 1}};
  for (const BackendKind kind : kBackends) {
    DcpCase whole(for_backend(setup, kind));
    DeviceHome home;
    try {
      run_backend(whole, kind, *groups[0], Context::cuda(0), {}, &home);
      ADD_FAILURE() << "did not throw";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("lie in another memory"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace folio::backends::testing
