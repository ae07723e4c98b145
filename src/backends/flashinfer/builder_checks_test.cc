#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "backends/flashinfer/group_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::Group;
using testing::LayerSetup;
using testing::message_of;

std::string construction_refusal(const std::function<void(Group&)>& change,
                                 ErrorCode code = ErrorCode::kInvalidArgument) {
  Group group;
  change(group);
  return message_of([&] { group.make(); }, code);
}

TEST(FlashInferMetadataBuilderTest, RefusesConfigurationsItCannotHonour) {
  const auto unsupported = [](const std::function<void(Group&)>& change) {
    return construction_refusal(change, ErrorCode::kUnsupported);
  };
  EXPECT_NE(construction_refusal([](Group& g) { g.config.parallel.decode_context_parallel_size = 2; },
                                 ErrorCode::kInvalidArgument)
                .find("decode_context_parallel_size is 2; dcp_group must be given"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) {
              g.config.compilation.decode_graph_mode = DecodeGraphMode::kFull;
            }).find("decode_graph_mode is kFull, which fixes shapes: max_num_seqs and max_model_len must be given"),
            std::string::npos);
  EXPECT_NE(unsupported([](Group& g) {
              g.config.use_block_table_kernels = true;
              g.options.profile = BackendProfile::kVllm2025_07;
            }).find("use_block_table_kernels"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) {
              g.config.use_block_table_kernels = true;
              g.options.dispatch = KernelDispatch();
            }).find("use_block_table_kernels is true in the engine's configuration and not given in the dispatch"),
            std::string::npos);
  LayerSetup december;
  december.profile = BackendProfile::kVllm2025_12;
  december.head_size = 64;
  december.quantize_query = true;
  EXPECT_NE(message_of([&] { Group(december).make(); }).find("vllm-2025-12 decides by itself"), std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.options.quantize_query = true; }).find("needs fp8_e4m3"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.options.force_kernel = "no-such-kernel"; }).find("no-such-kernel"),
            std::string::npos);
  EXPECT_NE(unsupported([](Group& g) {
              for (int32_t window = 1; window <= 9; ++window) {
                g.layer.sliding_window = window;
                g.add_layer();
              }
            }).find("a group may have up to 8 different ones"),
            std::string::npos);
  Group group;
  group.config.use_block_table_kernels = false;
  group.make();
}

TEST(FlashInferMetadataBuilderTest, RefusesConfigurationsThatContradictThemselves) {
  EXPECT_NE(construction_refusal([](Group& g) {
              g.config.cache.cache_dtype = "float16";
            }).find("with a model of bfloat16 the cache is of that dtype or fp8"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.spec.dtype = DType::kFloat16; }).find("spec has dtype float16"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.config.model.num_attention_heads = 8; }).find("layer0 has 4 q heads"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) {
              g.layer.kv_cache_dtype = "fp8";
              g.add_layer();
            }).find("layer0 has a cache of fp8_e4m3"),
            std::string::npos);
  const Group group;
  EXPECT_EQ(message_of([&] {
              FlashInferMetadataBuilder(group.fixture.context, group.spec,
                                        std::vector<AttentionLayer<FlashInferImpl>>{}, group.config);
            }),
            "No attention layers found in the model.");
  EXPECT_NE(message_of([&] {
              FlashInferMetadataBuilder(group.fixture.context, group.spec,
                                        std::vector<AttentionLayer<FlashInferImpl>>{{"empty", nullptr}}, group.config);
            }).find("layer empty has no implementation"),
            std::string::npos);
}

std::string build_refusal(const std::function<void(Group&, CommonAttentionMetadata&)>& change,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
  Group group;
  CommonAttentionMetadata batch = group.fixture.batch;
  change(group, batch);
  FlashInferMetadataBuilder builder = group.make();
  return message_of([&] { builder.build(0, batch); }, code);
}

TEST(FlashInferMetadataBuilderTest, RefusesBatchesThatContradictThemselves) {
  struct Case {
    std::function<void(Group&, CommonAttentionMetadata&)> change;
    std::string expected;
  };
  const std::vector<int32_t> from_one{1, 2, 3, 8, 13};
  const std::vector<int32_t> falling{0, 1, 0, 6, 12};
  const std::vector<int32_t> short_seq{32, 40, 4, 56};
  const Case cases[] = {
      {[](Group&, auto& b) { b.where = Where::kDevice; }, "on a device"},
      {[](Group& g, auto&) { g.config.scheduler.max_num_seqs = 3; }, "num_reqs is 4; max_num_seqs is 3"},
      {[](Group& g, auto&) { g.config.scheduler.max_num_batched_tokens = 8; },
       "num_actual_tokens is 12; max_num_batched_tokens is 8"},
      {[](Group& g, auto&) { g.config.model.max_model_len = 50; },
       "request 3 has a seq_len of 56; max_model_len is 50"},
      {[](Group&, auto& b) { b.num_reqs = -1; }, "num_reqs is -1"},
      {[](Group&, auto& b) { b.query_start_loc = b.query_start_loc.first(4); }, "query_start_loc has 4 entries"},
      {[](Group&, auto& b) { b.seq_lens = b.seq_lens.first(3); }, "seq_lens has 3 entries"},
      {[](Group&, auto& b) { b.num_actual_tokens = 11; }, "slot_mapping has 12 entries; num_actual_tokens is 11"},
      {[](Group&, auto& b) {
         b.num_actual_tokens = 11;
         b.slot_mapping = {};
       },
       "the requests have 12 query tokens; num_actual_tokens is 11"},
      {[](Group&, auto& b) { b.block_table.num_rows = 3; }, "the block table has 3 rows"},
      {[](Group&, auto& b) { b.block_table.row_stride = 1; }, "row stride of 1"},
      {[](Group&, auto& b) { b.block_table.num_columns = 3; },
       "request 3 has a seq_len of 56; a row of the block table has 3 pages of 16 tokens"},
      {[](Group&, auto& b) { b.max_query_len = 4; }, "request 2 has 5 query tokens; max_query_len is 4"},
      {[](Group&, auto& b) { b.max_seq_len = 50; }, "max_seq_len is 50"},
      {[&](Group&, auto& b) { b.query_start_loc = from_one; }, "query_start_loc begins with 1"},
      {[&](Group&, auto& b) { b.query_start_loc = falling; }, "request 1 has -1 query tokens"},
      {[&](Group&, auto& b) { b.seq_lens = short_seq; }, "request 2 has a seq_len of 4 and 5 query tokens"},
  };
  for (const Case& test : cases) {
    EXPECT_NE(build_refusal(test.change).find(test.expected), std::string::npos) << test.expected;
  }
}

TEST(FlashInferMetadataBuilderTest, RefusesBatchesItHasNoKernelsFor) {
  const auto unsupported = [](const std::function<void(Group&, CommonAttentionMetadata&)>& change) {
    return build_refusal(change, ErrorCode::kUnsupported);
  };
  unsupported([](Group&, auto& b) { b.causal = false; });
  unsupported([](Group&, auto& b) { b.encoder_seq_lens = b.seq_lens; });
  unsupported([](Group&, auto& b) { b.dcp_local_seq_lens = b.seq_lens; });
  unsupported([](Group&, auto& b) { b.logits_indices_padded = b.seq_lens; });
  Group group;
  FlashInferMetadataBuilder builder = group.make();
  for (const int32_t prefix : {-16, 8, 17}) {
    EXPECT_NE(message_of([&] { builder.build(prefix, group.fixture.batch); }).find("a multiple of the page size, 16"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
