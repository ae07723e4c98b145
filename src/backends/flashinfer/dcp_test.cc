// The backend under decode context parallelism: what its builder says of one rank, and outputs that are quantised.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/flashinfer/group_test_util.hpp"
#include "folio/distributed.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

using ::testing::ElementsAre;
using testing::Group;
using ::testing::HasSubstr;
using testing::LayerSetup;
using testing::message_of;

/// A builder of one rank of two; nothing here is collective.
struct RankGroup : Group {
  RankGroup(distributed::ProcessGroup& process_group, const LayerSetup& setup, const testing::BatchLengths& lengths)
      : Group(setup, lengths) {
    config.parallel.decode_context_parallel_size = process_group.size();
    config.parallel.decode_context_parallel_rank = process_group.rank();
    config.parallel.dcp_group = &process_group;
  }
};

TEST(FlashInferDcp, PagedKvArrays_OfARank_HaveItsShare) {
  const auto groups = distributed::make_thread_groups(2);
  for (const int32_t rank : {0, 1}) {
    RankGroup group(*groups[static_cast<size_t>(rank)], {}, {"decodes", {41, 17, 64}, {1, 1, 1}});
    FlashInferMetadataBuilder builder = group.make();
    const PagedKvArrays arrays = builder.paged_kv_arrays(builder.build(0, group.fixture.batch));
    // Tokens by turns: of 41 tokens rank 0 has 21, of 17 it has 9.
    if (rank == 0) {
      EXPECT_THAT(arrays.seq_lens, ElementsAre(21, 9, 32));
      EXPECT_THAT(arrays.last_page_len, ElementsAre(5, 9, 16));
    } else {
      EXPECT_THAT(arrays.seq_lens, ElementsAre(20, 8, 32));
      EXPECT_THAT(arrays.last_page_len, ElementsAre(4, 8, 16));
    }
    EXPECT_THAT(arrays.indptr, ElementsAre(0, 2, 3, 5));
    const auto row = [&](int32_t request) {
      return group.fixture.block_table.begin() + request * group.fixture.batch.block_table.row_stride;
    };
    EXPECT_THAT(arrays.indices, ElementsAre(row(0)[0], row(0)[1], row(1)[0], row(2)[0], row(2)[1]));
  }
}

TEST(FlashInferDcp, WorkspaceSize_OfARank_IsWhatItHolds) {
  const auto groups = distributed::make_thread_groups(2);
  RankGroup group(*groups[0], {}, {"decodes", {41, 17}, {1, 1}});
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_EQ(builder.workspace_buffer_size(), 0u) << "had when a step is planned";
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  ASSERT_GT(metadata.workspace.bytes, 0u);
  EXPECT_EQ(builder.workspace_buffer_size(), metadata.workspace.bytes);
}

TEST(FlashInferDcp, ForcedBlockTables_WarnOnceAndAreNotUsed) {
  const auto groups = distributed::make_thread_groups(2);
  std::vector<std::string> lines;
  RankGroup group(*groups[0], {}, {"decodes", {41, 17}, {1, 1}});
  group.config.use_block_table_kernels = true;
  group.options.log = OnceLog([&](LogLevel level, std::string_view line) {
    EXPECT_EQ(level, LogLevel::kWarning);
    lines.emplace_back(line);
  });
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_FALSE(builder.use_trtllm_decode_attention());
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  EXPECT_FALSE(metadata.decode_use_trtllm || metadata.prefill_use_trtllm);
  EXPECT_TRUE(metadata.dcp_plans.front().has_value());
  EXPECT_THAT(lines, ElementsAre("Trtllm does not support returning LSE and as a result does not support DCP, "
                                 "reverting to FlashInfer"));
}

/// The profiles' dispatch falls back likewise, and says so once, whatever the number of steps.
TEST(FlashInferDcp, ForcedBlockTablesOfDecember_FallBackAndRefuseSinks) {
  const auto groups = distributed::make_thread_groups(2);
  for (const bool sinks : {false, true}) {
    std::vector<std::string> warnings;
    DispatchFacts facts;
    facts.profile = BackendProfile::kVllm2025_12;
    facts.device = {Platform::kCuda, DeviceCapability{10, 0}};
    facts.has_flashinfer_cubin = true;
    facts.use_block_table_kernels = true;
    facts.log = [&](LogLevel, std::string_view line) { warnings.emplace_back(line); };
    LayerSetup setup;
    setup.profile = facts.profile;
    setup.head_size = 64;
    setup.layout = KvCacheLayout::kHnd;
    setup.sinks = sinks;
    RankGroup group(*groups[0], setup, {"decodes", {41, 17}, {1, 1}});
    group.config.use_block_table_kernels = true;
    group.layer.dispatch = group.options.dispatch = KernelDispatch(facts);
    FlashInferMetadataBuilder builder = group.make();
    if (sinks) {
      EXPECT_THAT(message_of([&] { builder.build(0, group.fixture.batch); }, ErrorCode::kUnsupported),
                  HasSubstr("does not support attention sinks"));
      continue;
    }
    for (int step = 0; step < 3; ++step) EXPECT_FALSE(builder.build(0, group.fixture.batch).decode_use_trtllm);
    EXPECT_THAT(warnings, ElementsAre("Trtllm does not support returning LSE and as a result does not support DCP, "
                                      "reverting to FlashInfer"));
  }
}

/// Two tokens, one on each rank. Queries of zeros weigh them alike: 3 is the mean of 2 and 4.
TEST(FlashInferDcp, OutputDtype_Fp8_IsWrittenByTheCombine) {
  constexpr int64_t kDim = 32;
  for (const bool planned : {true, false}) {
    std::vector<std::vector<uint8_t>> outputs(2, std::vector<uint8_t>(2 * kDim, 0xee));
    distributed::run_ranks(2, [&](distributed::ProcessGroup& process_group) {
      const auto rank = static_cast<size_t>(process_group.rank());
      const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
      EngineConfig engine;
      engine.model.dtype = DType::kFloat32;
      engine.model.num_attention_heads = 2;
      engine.model.num_kv_heads = 1;
      engine.parallel.decode_context_parallel_size = 2;
      engine.parallel.decode_context_parallel_rank = process_group.rank();
      engine.parallel.dcp_group = &process_group;
      FlashInferLayerConfig layer;
      layer.num_heads = 2;
      layer.num_kv_heads = 1;
      layer.head_size = kDim;
      layer.scale = 1.0f;
      layer.model_dtype = DType::kFloat32;
      const FlashInferImpl impl(context, layer);
      const std::vector<AttentionLayer<FlashInferImpl>> layers{{"layer", &impl}};
      FlashInferOptions options;
      if (planned) options.output_dtype = DType::kFloat8E4M3;
      FlashInferMetadataBuilder builder(context, {16, 1, kDim, DType::kFloat32}, layers, engine, options);

      const std::vector<float> q(2 * kDim), k(kDim), v(kDim, 4.0f);
      std::vector<float> pool(2 * 16 * kDim, 0.0f);
      for (int64_t d = 0; d < kDim && rank == 0; ++d) pool[static_cast<size_t>(16 * kDim + d)] = 2.0f;  // V of token 0
      const std::vector<int32_t> starts{0, 1}, seq_lens{2}, table{0};
      const std::vector<int64_t> slots{rank == 1 ? 0 : -1};
      CommonAttentionMetadata batch;
      batch.query_start_loc = starts;
      batch.seq_lens = seq_lens;
      batch.num_reqs = batch.num_actual_tokens = batch.max_query_len = 1;
      batch.max_seq_len = 2;
      batch.block_table = {table.data(), 1, 1, 1};
      batch.slot_mapping = slots;
      const FlashInferMetadata metadata = builder.build(0, batch);
      const TensorView cache = FlashInferBackend::kv_cache_tensor(
          pool.data(), DType::kFloat32, FlashInferBackend::get_kv_cache_shape(1, 16, 1, kDim), KvCacheLayout::kNhd);
      const float scale = 0.5f;
      const auto run = [&] {
        impl.forward({}, ConstTensorView(q.data(), DType::kFloat32, {1, 2, kDim}),
                     ConstTensorView(k.data(), DType::kFloat32, {1, 1, kDim}),
                     ConstTensorView(v.data(), DType::kFloat32, {1, 1, kDim}), cache, &metadata,
                     TensorView(outputs[rank].data(), DType::kFloat8E4M3, {1, 2, kDim}), {&scale, {}});
      };
      if (planned) {
        run();
      } else {
        EXPECT_THAT(message_of(run, ErrorCode::kUnsupported), HasSubstr("outputs of fp8_e4m3 are given under decode"));
      }
    });
    for (const std::vector<uint8_t>& output : outputs) {
      for (const uint8_t code : output) ASSERT_EQ(code, planned ? float_to_fp8_e4m3(6.0f) : 0xee);
    }
  }
}

TEST(FlashInferDcp, OutputDtype_Nvfp4_IsRefused) {
  const auto groups = distributed::make_thread_groups(2);
  RankGroup group(*groups[0], {}, {"decodes", {41}, {1}});
  group.options.output_dtype = DType::kFloat4E2M1x2;
  EXPECT_EQ(message_of([&] { group.make(); }, ErrorCode::kUnsupported),
            "output_dtype is fp4_e2m1x2 under decode context parallelism; bfloat16 and fp8_e4m3 are offered");
}

}  // namespace
}  // namespace folio::inline v0::backends
