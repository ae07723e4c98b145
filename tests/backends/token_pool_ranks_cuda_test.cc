// The token pool over ranks whose operations are enqueued, as NCCL's are: eager steps and graphs, with lengths that the
// host does not know.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "backends/token_pool/refusal_test_util.hpp"
#include "core/error.hpp"
#include "device_step.hpp"
#include "distributed/enqueued_group_test_util.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using cuda_test::CapturedGraph;
using cuda_test::TestStream;
using distributed::testing::EnqueuedGroup;
using testing::DeviceStep;
using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;
using Ints = std::vector<int32_t>;

const PoolLengths kDecodes{.mode = ForwardMode::kDecode, .prefix = {0, 1, 40, 300, 17}, .fresh = {1, 1, 1, 1, 1}};
const PoolLengths kExtends{.mode = ForwardMode::kExtend, .prefix = {0, 5, 270, 20}, .fresh = {7, 1, 20, 40}};
const PoolLengths kChains{.mode = ForwardMode::kTargetVerify, .prefix = {6, 260}, .fresh = {4, 4}};

using Division = std::tuple<int32_t, int32_t, std::string>;  ///< world, interleave, dcp_comm_backend

class TokenPoolRanksOnGpu : public ::testing::TestWithParam<Division> {
 protected:
  void SetUp() override {
    const std::string why = distributed::testing::why_no_enqueued_ranks(std::get<0>(GetParam()));
    if (!why.empty()) GTEST_SKIP() << why;
  }
  static PoolSetup setup() {
    PoolSetup setup;
    setup.head_dim = setup.v_head_dim = 64;
    setup.q_dtype = setup.kv_dtype = DType::kBFloat16;
    setup.interleave = std::get<1>(GetParam());
    setup.combine = std::get<2>(GetParam());
    return setup;
  }
  /// A layer on every rank. What moves tensors waits for the device, hence for operations that wait for this rank: the
  /// ranks meet before the first one is enqueued.
  static std::string wrong_forward(EnqueuedGroup& group, const TestStream& stream, DeviceStep& step,
                                   const RadixAttention& layer) {
    const DeviceStep::Tensors tensors = step.place(layer);
    group.meet();
    step.forward(layer, tensors);
    stream.wait();
    group.meet();
    return step.wrong_results(layer);
  }
  /// On every rank body(group, its fixture).
  template <typename Body>
  static void on_ranks(const PoolSetup& setup, const PoolLengths& lengths, Body&& body) {
    distributed::testing::run_enqueued_ranks(std::get<0>(GetParam()), [&](EnqueuedGroup& group) {
      PoolSetup own = setup;
      own.group = &group;
      PoolFixture fixture(own, lengths);
      body(group, fixture);
    });
  }
};

TEST_P(TokenPoolRanksOnGpu, GiveAttention) {
  for (const PoolLengths& lengths : {kDecodes, kExtends, kChains}) {
    for (const int32_t page_size : {1, 16}) {
      PoolSetup given = setup();
      given.window = 30;
      given.page_size = page_size;
      on_ranks(given, lengths, [&](EnqueuedGroup& group, PoolFixture& fixture) {
        const TestStream stream;
        DeviceStep step(fixture, group.context(), stream.get());
        step.init();
        for (const RadixAttention& layer : {fixture.layer(), fixture.full_layer()}) {
          EXPECT_EQ(wrong_forward(group, stream, step, layer), "")
              << to_string(lengths.mode) << ", rank " << group.rank();
        }
        step.backend().check_plans();
      });
    }
  }
}

TEST_P(TokenPoolRanksOnGpu, CrossAttention_GivesAttention) {
  PoolLengths lengths = kDecodes;
  lengths.encoder = {8, 1, 33, 300, 0};
  PoolSetup given = setup();
  given.encoder_decoder = true;
  on_ranks(given, lengths, [&](EnqueuedGroup& group, PoolFixture& fixture) {
    const TestStream stream;
    DeviceStep step(fixture, group.context(), stream.get());
    step.init();
    for (const RadixAttention& layer : {fixture.layer(), fixture.cross_layer()}) {
      EXPECT_EQ(wrong_forward(group, stream, step, layer), "") << "rank " << group.rank();
    }
  });
}

/// Captured with lengths of 1; a replay's are those that the device then has.
TEST_P(TokenPoolRanksOnGpu, Graphs_GiveAttention) {
  for (const PoolLengths& lengths : {kDecodes, kChains}) {
    PoolSetup given = setup();
    given.window = 30;
    on_ranks(given, lengths, [&](EnqueuedGroup& group, PoolFixture& fixture) {
      const TestStream stream;
      DeviceStep step(fixture, group.context(), stream.get());
      TokenPoolBackend& backend = step.backend();
      ForwardBatch& batch = step.batch();
      const Ints ones(fixture.num_requests(), 1);
      const auto bs = static_cast<int32_t>(fixture.num_requests());
      GraphBatchExtras extras;
      extras.spec_info = batch.spec_info;
      extras.token_to_kv_pool = batch.token_to_kv_pool;
      backend.init_cuda_graph_state(bs, fixture.num_tokens());
      for (const RadixAttention& layer : {fixture.layer(), fixture.full_layer()}) {
        backend.init_forward_metadata_capture_cuda_graph(bs, fixture.num_tokens(), batch.req_pool_indices,
                                                         step.place(ones), lengths.mode, extras, {}, stream.get());
        const DeviceStep::Tensors tensors = step.place(layer);
        stream.wait();
        group.meet();
        const CapturedGraph graph(stream, [&] { step.forward(layer, tensors); });
        for (int32_t replay = 0; replay < 2; ++replay) {
          backend.init_forward_metadata_replay_cuda_graph(bs, batch.req_pool_indices, batch.seq_lens, -1, lengths.mode,
                                                          {}, extras, stream.get());
          graph.launch(stream);
        }
        stream.wait();
        group.meet();
        EXPECT_EQ(step.wrong_results(layer), "") << to_string(lengths.mode) << ", rank " << group.rank();
      }
      backend.check_plans();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Divisions, TokenPoolRanksOnGpu,
                         ::testing::Combine(::testing::Values(2, 4), ::testing::Values(1, 16),
                                            ::testing::Values("ag_rs", "a2a")),
                         [](const auto& test) {
                           return core::message("W", std::get<0>(test.param), "I", std::get<1>(test.param), "_",
                                                std::get<2>(test.param));
                         });

/// A group that waits on the host cannot be captured.
TEST(TokenPoolRanksOnGpuGroups, ThatWaitOnTheHost_HaveNoGraphs) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  distributed::ThreadGroupOptions options;
  options.context = Context::cuda(0);
  const auto groups = distributed::make_thread_groups(2, options);
  PoolSetup setup;
  setup.q_dtype = setup.kv_dtype = DType::kBFloat16;
  setup.group = groups[0].get();
  PoolFixture fixture(setup, kDecodes);
  DeviceStep step(fixture, *options.context);
  EXPECT_EQ(testing::refusal([&] { step.backend().init_cuda_graph_state(8, 8); }, ErrorCode::kUnsupported),
            "dcp_group's operations wait on the host; graphs need a group whose ProcessGroup::enqueues is true");
}

}  // namespace
}  // namespace folio::inline v0::backends
