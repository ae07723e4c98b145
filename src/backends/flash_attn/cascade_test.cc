#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using testing::BatchLengths;
using testing::FlashAttnFixture;
using testing::golden_batch;
using testing::LayerSetup;
using testing::message_of;

std::vector<int32_t> copy(std::span<const int32_t> values) {
  return {values.begin(), values.end()};
}

/// A batch with a shared prefix, planned with it.
void cascade_and_compare(LayerSetup setup, const BatchLengths& lengths, int32_t prefix) {
  setup.shared_prefix = prefix;
  FlashAttnFixture fixture(setup, lengths);
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(prefix, fixture.batch);
  ASSERT_TRUE(metadata.use_cascade);
  ASSERT_EQ(metadata.common_prefix_len, prefix);
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_output(), "");
  EXPECT_EQ(fixture.wrong_cache(), "");
}

const BatchLengths kFew{"few", {64, 50, 33, 80}, {4, 1, 1, 7}};

TEST(FlashAttnCascade, MatchesFloat64InEveryLayoutAndDtype) {
  for (KvCacheLayout layout : {KvCacheLayout::kNhd, KvCacheLayout::kHnd}) {
    for (const char* cache_dtype : {"auto", "fp8_e4m3", "fp8_e5m2"}) {
      SCOPED_TRACE(std::string(to_string(layout)) + ", " + cache_dtype);
      LayerSetup setup;
      setup.layout = layout;
      setup.cache_dtype = cache_dtype;
      if (setup.cache_dtype != "auto") {
        setup.k_scale = 0.5f;
        setup.v_scale = 2.0f;
      }
      cascade_and_compare(setup, kFew, 32);
    }
  }
}

// The prefix holds every request's first keys: windows end at the query's own position, ALiBi measures from it, and a
// sink is in the denominator once, not once a part.
TEST(FlashAttnCascade, KeepsPositionsAndCountsSinksOnce) {
  LayerSetup sinks;
  sinks.sinks = true;
  cascade_and_compare(sinks, kFew, 16);
  LayerSetup window;
  window.sliding_window = 40;
  cascade_and_compare(window, kFew, 32);
  LayerSetup all;
  all.sliding_window = 35;
  all.alibi = true;
  all.sinks = true;
  all.logits_soft_cap = 30.0f;
  cascade_and_compare(all, kFew, 32);
}

TEST(FlashAttnCascade, LeavesPaddingAlone) {
  LayerSetup setup;
  setup.padding_tokens = 5;
  setup.padding_slots = 2;
  setup.padding_requests = 3;
  cascade_and_compare(setup, kFew, 32);
}

// Padding may stand anywhere, and its row of the block table holds anything: the prefix is that of the first request
// with queries.
TEST(FlashAttnCascade, Prefix_WithPaddingInRowZero_IsThatOfTheRequestsWithQueries) {
  LayerSetup setup;
  setup.starts = {{0, 0}, {0, 0}, {1, 32}, {1, 32}};
  FlashAttnFixture fixture(setup, {"padding in front", {48, 64, 50, 80}, {0, 4, 1, 7}});
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(32, fixture.batch);
  ASSERT_EQ(metadata.common_prefix_len, 32);
  EXPECT_EQ(metadata.prefix_request, 1);
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_output(), "");

  const std::vector<int32_t> suffix_kv_lens{16, 32, 18, 48};
  CascadeAttentionArgs args;
  args.cu_query_lens = fixture.query_start_loc;
  args.suffix_kv_lens = suffix_kv_lens;
  args.block_table = fixture.batch.block_table;
  args.common_prefix_len = 32;
  args.softmax_scale = fixture.layer.scale;
  std::ranges::fill(fixture.out_memory, testing::kUnwritten);
  const KvCacheView cache = FlashAttentionBackend::kv_cache_view(fixture.kv, DType::kBFloat16);
  cascade_attention(fixture.context, fixture.output, fixture.query, cache, args);
  EXPECT_EQ(fixture.wrong_output(), "");
}

class GoldenCascade : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenCascade, MatchesFloat64) {
  const BatchLengths lengths = golden_batch(GetParam());
  const auto prefix = GetParam().at<int32_t>("prefix");
  LayerSetup setup;
  setup.num_heads = 2;
  setup.num_kv_heads = 1;
  setup.head_size = 16;
  for (const bool capped : {false, true}) {
    if (folio::testing::kInstrumented && !capped) continue;
    if (capped) setup.logits_soft_cap = 50.0f;
    cascade_and_compare(setup, lengths, prefix);
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenCascade, ::testing::ValuesIn(golden_cases("backends/batches", "cascade")),
                         golden_case_name);

TEST(FlashAttnCascade, TakesTheGeometriesOfCascadeTests) {
  int number = 0;
  for (const GoldenCase& geometry : golden_cases("backends/batches", "cascade_geometries")) {
    if (folio::testing::kInstrumented && (geometry.ints("heads")[0] > 8 || number++ % 3 != 0)) continue;  // a minute
    SCOPED_TRACE(geometry.data.dump());
    LayerSetup setup;
    setup.num_heads = geometry.ints("heads")[0];
    setup.num_kv_heads = geometry.ints("heads")[1];
    setup.head_size = geometry.at<int32_t>("head_size");
    for (GoldenCase batch : golden_cases("backends/batches", "cascade")) {
      // Of many requests of a few lengths one of each.
      batch.data["seq_lens"][0] = 1;
      if (batch.data["query_lens"][1].size() == 1) batch.data["query_lens"][0] = batch.data["seq_lens"][1].size();
      cascade_and_compare(setup, golden_batch(batch), batch.at<int32_t>("prefix"));
      if (folio::testing::kInstrumented) break;
    }
  }
}

class CascadeMetadata : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(CascadeMetadata, Golden) {
  const auto& golden = GetParam();
  const auto& expected = golden.data["expected"];
  LayerSetup setup;
  setup.shared_prefix = golden.value("shared", golden.at<int32_t>("prefix"));
  setup.padding_requests = golden.value("padding_requests", 0);
  setup.determinism = golden.value("batch_invariant", false) ? Determinism::kBatchInvariant : Determinism::kRunToRun;
  FlashAttnFixture fixture(setup, {golden.name, golden.ints("seq_lens"), golden.ints("query_lens")});
  const bool aot = golden.value("aot", false) && !folio::testing::on_gpu();  // there a schedule is the plan
  fixture.options.aot_schedule = aot;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(golden.at<int32_t>("prefix"), fixture.batch);
  EXPECT_EQ(metadata.use_cascade, expected["use_cascade"]);
  EXPECT_EQ(metadata.common_prefix_len, expected["common_prefix_len"]);
  EXPECT_EQ(copy(metadata.cu_prefix_query_lens), expected["cu_prefix_query_lens"].get<std::vector<int32_t>>());
  EXPECT_EQ(copy(metadata.prefix_kv_lens), expected["prefix_kv_lens"].get<std::vector<int32_t>>());
  EXPECT_EQ(copy(metadata.suffix_kv_lens), expected["suffix_kv_lens"].get<std::vector<int32_t>>());
  const bool scheduled = expected["scheduled"] && aot;
  EXPECT_EQ(!metadata.scheduler_metadata.empty(), scheduled);
  EXPECT_EQ(!metadata.prefix_scheduler_metadata.empty(), scheduled && expected["use_cascade"]);
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_output(), "");
}

INSTANTIATE_TEST_SUITE_P(Cases, CascadeMetadata, ::testing::ValuesIn(golden_cases("backends/cascade_metadata")),
                         golden_case_name);

TEST(FlashAttnCascade, ReadsThePrefixOnce) {
  LayerSetup setup;
  setup.shared_prefix = 256;
  FlashAttnFixture fixture(setup, {"decodes", std::vector<int32_t>(20, 257), std::vector<int32_t>(20, 1)});
  fixture.options.aot_schedule = false;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const auto tokens_read = [](const FlashAttentionMetadata& metadata) {
    return summary(metadata.plans.front()->plan).kv_tokens_read;
  };
  const int64_t apart = tokens_read(builder.build(0, fixture.batch));
  const int64_t shared = tokens_read(builder.build(256, fixture.batch));
  if (!folio::testing::on_gpu()) {  // whose tiles are larger
    EXPECT_EQ(apart, 2 * 20 * 257);
  }
  EXPECT_LT(shared, apart / 5);
}

TEST(FlashAttnCascade, RefusesPrefixesOfNoWholePages) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  EXPECT_EQ(message_of([&] { builder.build(17, fixture.batch); }),
            "common_prefix_len is 17; it must be a multiple of the page size, 16");
  EXPECT_THROW(builder.build(-16, fixture.batch), Error);
}

// vLLM's own kernels see neither windows nor ALiBi right there, and say so.
TEST(FlashAttnCascade, IsRefusedWithWindowsAndAlibiAsInVllm) {
  const auto refusal = [](const LayerSetup& setup) {
    FlashAttnFixture fixture(setup);
    fixture.options.facts = testing::vllm_on_hopper();
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    return message_of([&] { builder.build(16, fixture.batch); });
  };
  LayerSetup alibi;
  alibi.alibi = true;
  EXPECT_EQ(refusal(alibi), "Cascade attention does not support ALiBi.");
  LayerSetup window;
  window.sliding_window = 40;
  EXPECT_EQ(refusal(window), "Cascade attention does not support sliding window.");
}

TEST(CascadeAttention, IsOneLayerWithoutABuilder) {
  LayerSetup setup;
  setup.shared_prefix = 32;
  setup.sinks = true;
  setup.sliding_window = 40;
  setup.cache_dtype = "fp8";
  setup.k_scale = 0.5f;
  setup.layout = KvCacheLayout::kHnd;
  FlashAttnFixture fixture(setup, kFew);
  fixture.make_impl().do_kv_cache_update(fixture.scales(), fixture.key, fixture.value, fixture.kv,
                                         fixture.slot_mapping);
  std::vector<int32_t> suffix_kv_lens = fixture.seq_lens;
  for (int32_t& len : suffix_kv_lens) len -= 32;
  CascadeAttentionArgs args;
  args.cu_query_lens = fixture.query_start_loc;
  args.suffix_kv_lens = suffix_kv_lens;
  args.block_table = fixture.batch.block_table;
  args.common_prefix_len = 32;
  args.softmax_scale = fixture.layer.scale;
  args.sliding_window = {39, 0};
  args.k_descale = fixture.scales().k;
  args.v_descale = fixture.scales().v;
  args.s_aux = fixture.sinks;
  const KvCacheView cache = FlashAttentionBackend::kv_cache_view(fixture.kv, DType::kFloat8E4M3);
  cascade_attention(fixture.context, fixture.output, fixture.query, cache, args);
  EXPECT_EQ(fixture.wrong_output(), "");

  args.profile = BackendProfile::kVllm2026_03;
  const auto call = [&] { cascade_attention(fixture.context, fixture.output, fixture.query, cache, args); };
  EXPECT_EQ(message_of(call), "Cascade attention does not support sliding window.");
  args.alibi_slopes = fixture.sinks;
  EXPECT_EQ(message_of(call), "Cascade attention does not support ALiBi.");
  args.profile = BackendProfile::kNative;
  args.common_prefix_len = 30;
  EXPECT_THROW(call(), Error);
}

}  // namespace
}  // namespace folio::inline v0::backends
