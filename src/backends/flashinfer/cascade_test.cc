#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/flashinfer/group_test_util.hpp"
#include "core/allocation_test_util.hpp"
#include "core/golden_test.hpp"

namespace folio::inline v0::backends {
namespace {

using nlohmann::json;
using testing::BatchFixture;
using testing::BatchLengths;
using testing::Group;
using testing::LayerSetup;

/// Requests that begin with the same 64 tokens, in the same pages.
const BatchLengths kShared{"shared", {130, 65, 81, 70}, {1, 1, 9, 6}};

void build_and_run(Group& group, int32_t prefix) {
  FlashInferMetadataBuilder builder = group.make();
  const BatchFixture& fixture = group.fixture;
  const FlashInferMetadata metadata = builder.build(prefix, fixture.batch);
  EXPECT_EQ(metadata.use_cascade, prefix > 0);
  group.impls.front().forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv_cache, &metadata,
                              fixture.output);
}

/// Every value of a layer that a cascade could lose: sinks once, windows by global positions, scales on both levels.
TEST(FlashInferCascade, GivesTheOraclesOutput) {
  for (const KvCacheLayout layout : {KvCacheLayout::kNhd, KvCacheLayout::kHnd}) {
    for (const std::string feature :
         {"plain", "sinks", "window", "wide window", "cap", "alibi", "fp8", "fp8 queries"}) {
      LayerSetup setup;
      setup.layout = layout;
      setup.shared_prefix = 64;
      setup.sinks = feature == "sinks";
      setup.alibi = feature == "alibi";
      if (feature == "window") setup.sliding_window = 20;
      if (feature == "wide window") setup.sliding_window = 50;  // reaches into the prefix, from some queries only
      if (feature == "cap") setup.logits_soft_cap = 3.0f;
      if (feature.starts_with("fp8")) {
        setup.cache_dtype = "fp8";
        setup.k_scale = 0.5f;
        setup.v_scale = 2.0f;
        setup.quantize_query = feature == "fp8 queries";
        setup.q_scale = 0.25f;
      }
      for (const int32_t prefix : {0, 16, 64}) {
        Group group(setup, kShared);
        build_and_run(group, prefix);
        EXPECT_EQ(group.fixture.wrong_output(), "") << feature << ", prefix " << prefix;
        EXPECT_EQ(group.fixture.wrong_cache(), "");
      }
    }
  }
}

TEST(FlashInferCascade, ReadsThePrefixOnce) {
  LayerSetup setup;
  setup.shared_prefix = 64;
  Group group(setup, kShared);
  FlashInferMetadataBuilder builder = group.make();
  const int64_t alone = summary(builder.build(0, group.fixture.batch).plans[0]->plan).kv_tokens_read;
  const int64_t shared = summary(builder.build(64, group.fixture.batch).plans[0]->plan).kv_tokens_read;
  EXPECT_LE(shared, alone - 3 * 64);
}

TEST(FlashInferCascade, UsesWhatEveryRequestHasComputed) {
  const json document = folio::testing::golden("flashinfer/metadata");
  for (const json& golden : document.at("prefixes")) {
    LayerSetup setup;
    setup.shared_prefix = golden.at("usable");
    Group group(setup, {"prefix", golden.at("seq_lens"), golden.at("query_lens")});
    FlashInferMetadataBuilder builder = group.make();
    const FlashInferMetadata metadata = builder.build(golden.at("prefix"), group.fixture.batch);
    EXPECT_EQ(metadata.common_prefix_len, golden.at("usable").get<int32_t>()) << golden;
    EXPECT_EQ(metadata.use_cascade, metadata.common_prefix_len > 0);
    build_and_run(group, golden.at("usable"));
    EXPECT_EQ(group.fixture.wrong_output(), "") << golden;
  }
}

TEST(FlashInferCascade, PaddingRequestsDoNotShortenThePrefix) {
  LayerSetup setup;
  setup.shared_prefix = 64;
  setup.padding_requests = 3;
  setup.padding_tokens = 2;
  Group group(setup, kShared);
  build_and_run(group, 64);
  EXPECT_EQ(group.fixture.wrong_output(), "") << "the padded output is what was given";
}

TEST(FlashInferCascade, Forward_RowZeroIsPadding_ReadsARowWithQueries) {
  LayerSetup setup;
  setup.starts = {{}, {}, {1, 64}, {1, 64}};
  Group group(setup, {"padding first", {0, 130, 65, 81}, {0, 1, 1, 9}});
  build_and_run(group, 64);
  EXPECT_EQ(group.fixture.wrong_output(), "");
  FlashInferMetadataBuilder builder = group.make();
  const FlashInferMetadata metadata = builder.build(64, group.fixture.batch);
  EXPECT_EQ(metadata.prefix_request, 1);
  const auto row = group.fixture.block_table.begin() + group.fixture.batch.block_table.row_stride;
  EXPECT_EQ(folio::testing::on_host(builder.paged_kv_arrays(metadata).shared_kv_page_indices),
            std::vector<int32_t>(row, row + 4));
}

TEST(FlashInferCascade, DescribesBothLevelsAsCsrArrays) {
  LayerSetup setup;
  setup.shared_prefix = 64;
  Group group(setup, kShared);
  FlashInferMetadataBuilder builder = group.make();
  const FlashInferMetadata metadata = builder.build(64, group.fixture.batch);
  const PagedKvArrays arrays = builder.paged_kv_arrays(metadata);
  EXPECT_EQ(arrays.shared_qo_indptr, (std::array<int32_t, 2>{0, 17}));
  EXPECT_EQ(arrays.shared_kv_page_indptr, (std::array<int32_t, 2>{0, 4}));
  EXPECT_EQ(arrays.shared_kv_last_page_len, 16);
  EXPECT_EQ(folio::testing::on_host(arrays.shared_kv_page_indices),
            std::vector<int32_t>(group.fixture.block_table.begin(), group.fixture.block_table.begin() + 4));
  EXPECT_EQ(std::vector<int32_t>(arrays.indptr.begin(), arrays.indptr.end()), (std::vector<int32_t>{0, 5, 6, 8, 9}))
      << "the prefix's pages are subtracted once";
  EXPECT_EQ(std::vector<int32_t>(arrays.last_page_len.begin(), arrays.last_page_len.end()),
            (std::vector<int32_t>{2, 1, 1, 6}));
  EXPECT_EQ(folio::testing::on_host(arrays.indices)[0], group.fixture.block_table[4]) << "of the shifted table";
}

TEST(FlashInferCascade, AllocatesNothingOnceWarm) {
  LayerSetup setup;
  setup.shared_prefix = 64;
  Group group(setup, kShared);
  FlashInferMetadataBuilder builder = group.make();
  for (const int32_t prefix : {64, 0}) builder.build(prefix, group.fixture.batch);
  const int64_t warm = folio::testing::num_allocations();
  for (int i = 0; i < 3; ++i) builder.build(i % 2 * 64, group.fixture.batch);
  EXPECT_EQ(folio::testing::num_allocations(), warm);
}

TEST(FlashInferCascade, IsNoneUnderBatchInvariance) {
  LayerSetup setup;
  setup.shared_prefix = 64;
  setup.determinism = Determinism::kBatchInvariant;
  Group group(setup, kShared);
  EXPECT_FALSE(group.make().build(64, group.fixture.batch).use_cascade) << "bits would depend on what others share";
}

TEST(FlashInferCascade, LeavesTheBlockTableFamilyAside) {
  LayerSetup setup;
  setup.shared_prefix = 64;
  Group group(setup, kShared);
  group.config.use_block_table_kernels = true;
  FlashInferMetadataBuilder builder = group.make();
  const FlashInferMetadata metadata = builder.build(64, group.fixture.batch);
  EXPECT_FALSE(metadata.prefill_use_trtllm);
  EXPECT_FALSE(metadata.decode_use_trtllm);
  build_and_run(group, 64);
  EXPECT_EQ(group.fixture.wrong_output(), "");
}

TEST(FlashInferCascade, IsAskedForByProfile) {
  CascadeHeuristicInput input;
  input.common_prefix_len = 256;
  const std::vector<int32_t> query_lens(17, 1);
  input.query_lens = query_lens;
  input.num_query_heads = 32;
  input.num_kv_heads = 8;
  input.num_sms = 132;
  const auto asked = [&](BackendProfile profile, const std::string& cache_dtype) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    setup.cache_dtype = cache_dtype;
    return Group(setup).make().use_cascade_attention(input);
  };
  EXPECT_TRUE(asked(BackendProfile::kNative, "auto"));
  EXPECT_TRUE(asked(BackendProfile::kNative, "fp8"));
  EXPECT_TRUE(asked(BackendProfile::kVllm2025_07, "auto"));
  EXPECT_FALSE(asked(BackendProfile::kVllm2025_07, "fp8")) << "the wrapper took one dtype for queries and cache";
  EXPECT_FALSE(asked(BackendProfile::kVllm2025_12, "auto"));
  input.query_lens = std::span(query_lens).first(7);
  EXPECT_FALSE(asked(BackendProfile::kNative, "auto"));
}

}  // namespace
}  // namespace folio::inline v0::backends
