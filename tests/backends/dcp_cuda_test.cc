// Both engine backends over a cache that is divided over threads on one GPU, against the float64 oracle over the whole
// one.
#include <gtest/gtest.h>

#include <tuple>

#include "core/error.hpp"
#include "dcp_setups.hpp"
#include "device_home.hpp"
#include "distributed/enqueued_group_test_util.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

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

void bound(EngineConfig& engine) {
  engine.scheduler.max_num_seqs = 4;
  engine.scheduler.max_num_batched_tokens = 32;
  engine.model.max_model_len = 96;
}

/// A batch of which the host knows bounds only.
void forget_lengths(CommonAttentionMetadata& batch) {
  batch.query_start_loc_host = batch.seq_lens_host = batch.encoder_seq_lens_host = {};
  batch.dcp_local_seq_lens = {};
}

/// Captures a step's layers and replays them.
class GraphHome final : public DeviceHome {
 public:
  explicit GraphHome(distributed::testing::EnqueuedGroup& group) : group_(group) {}
  Stream stream() const override { return stream_.get(); }
  void run_layers(const std::function<void()>& layers) override {
    group_.meet();
    const cuda_test::CapturedGraph graph(stream_, layers);
    if (before_replays) before_replays();
    for (int32_t replay = 0; replay < 2; ++replay) graph.launch(stream_);
    stream_.wait();
    group_.meet();
  }

  std::function<void()> before_replays;

 private:
  distributed::testing::EnqueuedGroup& group_;
  cuda_test::TestStream stream_;
};

/// Captured layers, over a group whose operations are enqueued, as NCCL's are.
TEST_P(DcpBackendsOnGpu, EqualTheUndividedCacheInGraphs) {
  const auto [kind, world, interleave, combine] = GetParam();
  if (const std::string why = distributed::testing::why_no_enqueued_ranks(world); !why.empty()) GTEST_SKIP() << why;
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
      bound(engine);
    };
    FlashAttentionHooks hooks;
    hooks.options = [](FlashAttentionOptions& options) { options.steps_in_flight = 1; };
    const auto body = [&, kind = kind](distributed::testing::EnqueuedGroup& group) {
      GraphHome home(group);
      run_backend(whole, kind, group, group.context(), graphs, &home, hooks);
    };
    distributed::testing::run_enqueued_ranks(world, body);
    EXPECT_EQ(whole.wrong_outputs(), "") << setup.name;
  }
}

/// FlashAttention plans on the device, in the graph: a replay's lengths are those of its moment, whatever they were
/// when it was captured.
TEST_P(DcpBackendsOnGpu, EqualTheUndividedCacheFromDeviceLengths) {
  const auto [kind, world, interleave, combine] = GetParam();
  if (kind != BackendKind::kFlashAttention) GTEST_SKIP() << "FlashInfer's builder plans from the host's lengths";
  if (const std::string why = distributed::testing::why_no_enqueued_ranks(world); !why.empty()) GTEST_SKIP() << why;
  DcpSetup mixed;
  mixed.name = "mixed";
  mixed.world = world;
  mixed.interleave = interleave;
  mixed.combine = combine;
  mixed.model = mixed.cache = DType::kBFloat16;
  mixed.requests = {{70, 1}, {33, 5}, {12, 12}};
  DcpSetup window = mixed;
  window.name = "a window, sinks, all queries on all ranks";
  window.window_left = 20;
  window.sinks = window.replicated_queries = true;
  DcpSetup cross = mixed;
  cross.name = "cross attention";
  cross.cross = true;
  for (const DcpSetup& setup : {mixed, window, cross}) {
    DcpCase whole(for_backend(setup, kind));
    FlashAttentionHooks hooks;
    hooks.options = [](FlashAttentionOptions& options) {
      options.plan_from_device_lengths = true;
      options.steps_in_flight = 1;
    };
    hooks.built = [](FlashAttentionMetadata& metadata) { EXPECT_TRUE(metadata.dcp_context_kv_lens.empty()); };
    hooks.builds_with_layers = true;
    const auto body = [&](distributed::testing::EnqueuedGroup& group) {
      GraphHome home(group);
      const std::vector<int32_t> lens = whole.seq_lens;
      const auto change = [&](EngineConfig& engine, CommonAttentionMetadata& batch) {
        bound(engine);
        forget_lengths(batch);
        auto* const device = const_cast<int32_t*>((setup.cross ? batch.encoder_seq_lens : batch.seq_lens).data());
        const auto write = [device](const std::vector<int32_t>& values) {
          cuda_test::check(cudaMemcpy(device, values.data(), values.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
          cuda_test::check(cudaStreamSynchronize(nullptr));
        };
        std::vector<int32_t> shorter;
        for (const auto& request : setup.requests) shorter.push_back(request.q_len);
        write(shorter);
        home.before_replays = [write, lens] { write(lens); };
      };
      run_backend(whole, BackendKind::kFlashAttention, group, group.context(), change, &home, hooks);
    };
    distributed::testing::run_enqueued_ranks(world, body);
    EXPECT_EQ(whole.wrong_outputs(), "") << setup.name;
  }
}

/// The same over a group that waits on the host, without a graph; and what does not go with it.
TEST(DcpBackendsOnGpuLengths, ArePlannedEagerlyToo) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  DcpSetup setup;
  setup.model = setup.cache = DType::kBFloat16;
  setup.requests = {{70, 1}, {33, 5}, {12, 12}};
  DcpCase whole(for_backend(setup, BackendKind::kFlashAttention));
  FlashAttentionHooks hooks;
  hooks.options = [](FlashAttentionOptions& options) { options.plan_from_device_lengths = true; };
  const Context context = Context::cuda(0);
  const auto body = [&](distributed::ProcessGroup& group) {
    DeviceHome home;
    const auto change = [](EngineConfig& engine, CommonAttentionMetadata& batch) {
      bound(engine);
      forget_lengths(batch);
    };
    run_backend(whole, BackendKind::kFlashAttention, group, context, change, &home, hooks);
  };
  distributed::run_ranks(2, body, group_options(context));
  EXPECT_EQ(whole.wrong_outputs(), "");

  const auto shares_given = [&](distributed::ProcessGroup& group) {
    DeviceHome home;
    const auto change = [](EngineConfig& engine, CommonAttentionMetadata& batch) {
      bound(engine);
      const std::span<const int32_t> shares = batch.dcp_local_seq_lens;
      forget_lengths(batch);
      batch.dcp_local_seq_lens = shares;
    };
    try {
      run_backend(whole, BackendKind::kFlashAttention, group, context, change, &home, hooks);
      ADD_FAILURE() << "did not throw";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("shares of lengths are made on the device"), std::string::npos)
          << error.what();
    }
  };
  distributed::run_ranks(2, shares_given, group_options(context));
}

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
