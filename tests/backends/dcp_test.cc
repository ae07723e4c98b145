// Both engine backends over a divided cache, in threads, against the float64 oracle over the whole one.
#include <gtest/gtest.h>

#include <chrono>
#include <tuple>

#include "backend_step.hpp"
#include "core/error.hpp"
#include "core/instrumented_test_util.hpp"
#include "dcp_setups.hpp"
#include "folio/backends/flash_attn.hpp"

namespace folio::backends::testing {
namespace {

void expect_right(DcpSetup setup, BackendKind kind, const Change& change = {}) {
  setup = for_backend(setup, kind);
  DcpCase whole(setup);
  distributed::run_ranks(setup.world, [&](distributed::ProcessGroup& group) {
    run_backend(whole, kind, group, Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}}), change);
  });
  EXPECT_EQ(whole.wrong_outputs(), "") << "interleave " << setup.interleave << ", "
                                       << distributed::to_string(setup.combine) << (setup.hnd ? ", HND" : ", NHD");
}

using Division = std::tuple<BackendKind, int32_t, int32_t>;  ///< backend, world, interleave

/// Half of them under sanitizers, which look for other mistakes than wrong sums.
std::vector<int32_t> interleaves() {
  if (folio::testing::kInstrumented) return {1, 16};
  return {1, 2, 16, 32};
}

class DcpBackends : public ::testing::TestWithParam<Division> {};

TEST_P(DcpBackends, FeaturesAndCaches) {
  const auto [kind, world, interleave] = GetParam();
  bool skipped_layout_hnd = false;
  std::vector<DcpSetup> setups = dcp_setups(world, interleave);
  if (kind == BackendKind::kFlashAttention) {
    for (DcpSetup& setup : cross_setups(world, interleave)) setups.push_back(std::move(setup));
  }
  for (DcpSetup setup : setups) {
    for (const auto combine : {distributed::DcpCombine::kAllGatherReduceScatter, distributed::DcpCombine::kAllToAll}) {
      if (setup.all_heads_out && combine == distributed::DcpCombine::kAllToAll) continue;  // leaves each its own
      setup.combine = combine;
      setup.hnd = !setup.hnd;
      if (folio::testing::kInstrumented && setup.hnd == skipped_layout_hnd) continue;  // one of the two, in turn
      expect_right(setup, kind);
    }
    skipped_layout_hnd = !skipped_layout_hnd;
  }
}

TEST_P(DcpBackends, SixteenBitPartialResults) {
  const auto [kind, world, interleave] = GetParam();
  for (const auto combine : {distributed::DcpCombine::kAllGatherReduceScatter, distributed::DcpCombine::kAllToAll}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      DcpSetup setup;
      setup.name = "16-bit partial results";
      setup.world = world;
      setup.interleave = interleave;
      setup.combine = combine;
      setup.requests = {{70, 1}, {65, 1}, {131, 17}};
      setup.model = setup.cache = setup.partial = dtype;
      expect_right(setup, kind);
    }
  }
}

std::string division_name(const ::testing::TestParamInfo<Division>& test) {
  return core::message(std::get<0>(test.param) == BackendKind::kFlashInfer ? "FlashInfer" : "FlashAttention", "_W",
                       std::get<1>(test.param), "I", std::get<2>(test.param));
}

INSTANTIATE_TEST_SUITE_P(Divisions, DcpBackends,
                         ::testing::Combine(::testing::ValuesIn(kBackends), ::testing::Values(1, 2, 3, 4),
                                            ::testing::ValuesIn(interleaves())),
                         division_name);

// What the batch says of causality holds for the new tokens too: without a window every key is visible, later ones
// included; a window ends at its query.
TEST(DcpNonCausal, SeesLaterKeysWhereTheLayerHasNoWindow) {
  for (const int32_t world : {1, 2, 4}) {
    for (const int32_t window_left : {-1, 20}) {
      DcpSetup setup;
      setup.name = "not causal";
      setup.world = world;
      setup.requests = {{70, 1}, {65, 4}, {40, 40}, {131, 17}};
      setup.window_left = window_left;
      setup.sinks = true;
      if (window_left < 0) setup.mask = MaskKind::kNone;
      expect_right(setup, BackendKind::kFlashAttention,
                   [](EngineConfig&, CommonAttentionMetadata& batch) { batch.causal = false; });
    }
  }
}

TEST(DcpBackendConfigurations, RefuseWhatContradictsTheGroup) {
  auto groups = distributed::make_thread_groups(2, {std::chrono::seconds(40)});
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  const auto refused = [&](const char* text, auto change, ErrorCode code = ErrorCode::kInvalidArgument) {
    DcpSetup setup;
    setup.requests = {{5, 1}};
    DcpCase whole(for_backend(setup, BackendKind::kFlashInfer));
    for (const BackendKind kind : kBackends) {
      try {
        run_backend(whole, kind, *groups[1], context, change);
        ADD_FAILURE() << "did not throw: " << text;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      }
    }
  };
  refused("dcp_group must be given", [](EngineConfig& c, auto&) { c.parallel.dcp_group = nullptr; });
  refused("is rank 0 of 2", [](EngineConfig& c, auto&) { c.parallel.decode_context_parallel_rank = 0; });
  refused("is rank 1 of 4", [](EngineConfig& c, auto&) { c.parallel.decode_context_parallel_size = 4; });
  refused("it must be 1 or more", [](EngineConfig& c, auto&) { c.parallel.decode_context_parallel_size = 0; });
  refused("requires decode_context_parallel_size > 1", [](EngineConfig& c, auto&) {
    c.parallel.decode_context_parallel_size = 1;
    c.parallel.dcp_comm_backend = "a2a";
  });
  refused("dcp_all_heads_out is set with dcp_replicated_queries false",
          [](EngineConfig& c, auto&) { c.parallel.dcp_all_heads_out = true; });
  refused("dcp_all_heads_out is set with a dcp_comm_backend of a2a", [](EngineConfig& c, auto&) {
    c.parallel.dcp_all_heads_out = c.parallel.dcp_replicated_queries = true;
    c.parallel.dcp_comm_backend = "a2a";
  });
  refused(
      "transport is peer", [](EngineConfig& c, auto&) { c.parallel.dcp_transport = distributed::DcpTransport::kPeer; },
      ErrorCode::kUnsupported);
  refused("partial_dtype is float16 and out float32",
          [](EngineConfig& c, auto&) { c.parallel.dcp_partial_dtype = DType::kFloat16; });
  refused("layer layer has a dcp_query_ranks of 1; with 2 ranks and dcp_replicated_queries true it is 2",
          [](EngineConfig& c, auto&) { c.parallel.dcp_replicated_queries = true; });
  refused("'ag_rs' and 'a2a' are offered", [](EngineConfig& c, auto&) { c.parallel.dcp_comm_backend = "ring"; });
  refused("it must divide the page size, 32",
          [](EngineConfig& c, auto&) { c.parallel.cp_kv_cache_interleave_size = 5; });
  refused("but decode_context_parallel_size is 1",
          [](EngineConfig& c, auto&) { c.parallel.decode_context_parallel_size = 1; });
  refused(
      "graphs need a group over a GPU whose ProcessGroup::enqueues is true",
      [](EngineConfig& c, auto&) {
        c.compilation.decode_graph_mode = DecodeGraphMode::kFull;
        c.scheduler.max_num_seqs = c.scheduler.max_num_batched_tokens = c.model.max_model_len = 64;
      },
      ErrorCode::kUnsupported);
  const std::vector<int32_t> wrong{3};
  refused("has a dcp_local_seq_lens of 3; of 5 tokens this rank has 2",
          [&](EngineConfig&, CommonAttentionMetadata& b) { b.dcp_local_seq_lens = wrong; });
}

TEST(DcpBackendConfigurations, RefuseNvfp4Outputs) {
  auto groups = distributed::make_thread_groups(2, {std::chrono::seconds(40)});
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  EngineConfig engine;
  engine.model.num_attention_heads = engine.model.num_kv_heads = 2;
  engine.parallel.decode_context_parallel_size = 2;
  engine.parallel.dcp_group = groups[0].get();
  FlashAttentionLayerConfig layer;
  layer.num_heads = layer.num_kv_heads = 2;
  layer.head_size = 32;
  layer.scale = 1.0f;
  const FlashAttentionImpl impl(context, layer);
  const std::vector<AttentionLayer<FlashAttentionImpl>> layers{{"layer", &impl}};
  FlashAttentionOptions options;
  options.output_dtype = DType::kFloat4E2M1x2;
  try {
    FlashAttentionMetadataBuilder(context, {16, 2, 32, DType::kBFloat16}, layers, engine, options);
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_STREQ(error.what(),
                 "output_dtype is fp4_e2m1x2 under decode context parallelism; bfloat16 and fp8 are offered");
  }
}

}  // namespace
}  // namespace folio::backends::testing
