#include "folio/backends/flashinfer/block_table.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "backends/flashinfer/batch_test_util.hpp"
#include "backends/flashinfer/group_test_util.hpp"
#include "core/allocation_test_util.hpp"
#include "core/golden_test.hpp"
#include "core/instrumented_test_util.hpp"
#include "folio/quantize.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

using nlohmann::json;
using testing::BatchFixture;
using testing::BatchLengths;
using ::testing::HasSubstr;
using testing::LayerSetup;
using testing::message_of;

/// One call of the family over a fixture's cache.
struct Call {
  BatchFixture fixture;
  BlockTableWorkspace workspace;
  BlockTableArgs args;
  std::vector<int32_t> seq_lens;
  int64_t tokens;
  int64_t heads;
  int64_t dim;

  Call(LayerSetup setup, const BatchLengths& lengths, Determinism determinism = Determinism::kRunToRun)
      : fixture((setup.share_kv = true, setup), lengths),
        workspace(fixture.context, determinism),
        seq_lens(fixture.seq_lens),
        tokens(fixture.num_tokens()),
        heads(setup.num_heads),
        dim(setup.head_size) {
    args.query = fixture.query;
    args.kv_cache = FlashInferBackend::kv_cache_view(fixture.kv_cache,
                                                     kv_cache_dtype_from_name(setup.cache_dtype, setup.model_dtype));
    args.block_tables = fixture.batch.block_table;
    args.seq_lens = seq_lens;
    args.max_seq_len = fixture.batch.max_seq_len;
    args.bmm1_scale = setup.k_scale / std::sqrt(static_cast<float>(setup.head_size));
    if (setup.quantize_query) args.bmm1_scale *= setup.q_scale;
    args.bmm2_scale = setup.v_scale;
    args.window_left = setup.sliding_window ? *setup.sliding_window - 1 : -1;
    args.logits_soft_cap = setup.logits_soft_cap.value_or(0.0f);
    args.sinks = setup.sinks ? fixture.sinks.data() : nullptr;
    args.alibi_slopes = setup.alibi ? fixture.alibi_slopes.data() : nullptr;
    args.out = fixture.output;
  }
  void decode(int32_t q_len = 0) { trtllm_batch_decode_with_kv_cache(workspace, args, q_len); }
  void context() { trtllm_batch_context_with_kv_cache(workspace, args, fixture.query_start_loc, 0); }
};

LayerSetup setup_of(const json& shape, const json& dtypes) {
  LayerSetup setup;
  setup.num_heads = shape.at("heads")[0];
  setup.num_kv_heads = shape.at("heads")[1];
  setup.head_size = 128;
  setup.page_size = shape.at("page_size");
  setup.layout = kv_cache_layout_from_name(shape.at("layout").get<std::string>());
  setup.sinks = shape.at("sinks");
  if (shape.at("window_left") >= 0) setup.sliding_window = shape.at("window_left").get<int32_t>() + 1;
  if (shape.at("soft_cap") > 0) setup.logits_soft_cap = shape.at("soft_cap").get<float>();
  if (dtypes.at("kv") == "fp8") {
    setup.cache_dtype = "fp8";
    setup.k_scale = 0.02f;
    setup.v_scale = 0.03f;
  }
  if (dtypes.at("q") == "fp8") {
    setup.quantize_query = true;
    setup.q_scale = 0.7f;
  }
  return setup;
}

BatchLengths lengths_of(const json& shape) {
  const auto seq_lens = shape.at("seq_lens").get<std::vector<int32_t>>();
  if (shape.contains("query_lens")) return {"prefill", seq_lens, shape.at("query_lens").get<std::vector<int32_t>>()};
  return {"decode", seq_lens, std::vector<int32_t>(seq_lens.size(), shape.at("q_len").get<int32_t>())};
}

void execute(Call& call, const json& shape) {
  if (shape.contains("query_lens")) {
    call.context();
  } else {
    call.decode(shape.at("q_len").get<int32_t>());
  }
}

/// fp8: within half a step of e4m3 (3 bits of significand, subnormals 2^-9 apart) of the wide result in stored units.
/// Both are float32 sums of up to 256 products below 1 in size, 256 * 2^-24 more, and of probabilities that either may
/// have rounded in its own way.
void expect_fp8(const std::vector<uint8_t>& stored, const std::vector<float>& wide, float o_scale, double p_roundoff) {
  for (size_t i = 0; i < wide.size(); ++i) {
    const double exact = std::clamp(static_cast<double>(wide[i]) / static_cast<double>(o_scale), -448.0, 448.0);
    const double got = static_cast<double>(fp8_e4m3_to_float(stored[i]));
    const double sums = (0x1p-16 + 2.0 * p_roundoff) / static_cast<double>(o_scale);
    ASSERT_NEAR(got, exact, std::max(std::abs(exact) * 0x1p-4, 0x1p-10) * (1.0 + 0x1p-10) + sums) << i;
  }
}

/// NVFP4: half a step of e2m1 is at most 1 in units of the factor, which is within 1/16 of amax / 6.
void expect_nvfp4(const std::vector<float>& real, const std::vector<float>& wide) {
  for (size_t block = 0; block < wide.size() / 16; ++block) {
    double largest = 0.0;
    for (size_t i = block * 16; i < block * 16 + 16; ++i) largest = std::max(largest, std::abs(double{wide[i]}));
    for (size_t i = block * 16; i < block * 16 + 16; ++i) {
      ASSERT_NEAR(double{real[i]}, double{wide[i]}, largest / 6.0 * (1.0 + 0x1p-4 + 0x1p-10)) << i;
    }
  }
}

TEST(BlockTables, GiveTheOraclesOutputInEveryGoldenShapeAndDtype) {
  const json golden = folio::testing::golden("flashinfer/block_table");
  int32_t number = 0;
  for (const json& shape : golden.at("shapes")) {
    for (const json& dtypes : golden.at("dtypes")) {
      if (folio::testing::kInstrumented && number++ % 3 != 0) continue;
      SCOPED_TRACE(shape.dump() + dtypes.dump());
      Call call(setup_of(shape, dtypes), lengths_of(shape));
      execute(call, shape);
      ASSERT_EQ(call.fixture.wrong_output(), "");
      if (dtypes.at("out") == "bf16") continue;
      std::vector<float> wide(static_cast<size_t>(call.tokens * call.heads * call.dim));
      call.args.out = TensorView(wide.data(), DType::kFloat32, {call.tokens, call.heads, call.dim});
      execute(call, shape);
      if (dtypes.at("out") == "fp8") {
        constexpr float kOutScale = 0.005f;
        std::vector<uint8_t> stored(wide.size());
        call.args.out = TensorView(stored.data(), DType::kFloat8E4M3, {call.tokens, call.heads, call.dim});
        call.args.bmm2_scale /= kOutScale;
        execute(call, shape);
        expect_fp8(stored, wide, kOutScale, call.fixture.p_roundoff());
        continue;
      }
      // A whole matrix whose rows from 5 on are this call's.
      constexpr float kGlobalScale = 900.0f;
      const int64_t blocks = call.heads * call.dim / 16;
      std::vector<uint8_t> codes(wide.size() / 2);
      std::vector<uint8_t> scales(static_cast<size_t>(nvfp4_scale_bytes(call.tokens + 5, blocks)));
      FP4Tensor fp4;
      fp4.data = TensorView(codes.data(), DType::kUnset, {call.tokens, call.heads, call.dim / 2});
      fp4.scale = TensorView(scales.data(), DType::kUnset, {static_cast<int64_t>(scales.size()) / blocks, blocks});
      fp4.scale_start_index = 5;
      fp4.original_shape = {call.tokens, call.heads, call.dim};
      call.args.out = fp4;
      call.args.o_sf_scale = kGlobalScale;
      execute(call, shape);
      std::vector<float> real(wide.size());
      dequantize_nvfp4(call.fixture.context,
                       ConstTensorView(codes.data(), DType::kFloat4E2M1x2, {call.tokens, call.heads, call.dim / 2}),
                       {scales.data(), 5}, kGlobalScale,
                       TensorView(real.data(), DType::kFloat32, {call.tokens, call.heads, call.dim}));
      expect_nvfp4(real, wide);
    }
  }
}

TEST(BlockTables, GiveTheLayersScalesToBmm1Once) {
  const json document = folio::testing::golden("flashinfer/block_table");
  for (const json& golden : document.at("bmm1")) {
    LayerSetup setup;
    setup.cache_dtype = "fp8";
    setup.scale = golden.at("scale");
    const BatchFixture fixture(setup, testing::backend_batch("small_decode"));
    const FlashInferImpl impl(fixture.context, fixture.layer_config());
    AttentionLayerScales scales;
    scales.q.value = golden.at("q_scale");
    scales.k.value = golden.at("k_scale");
    const DType q = golden.at("q") == "fp8" ? DType::kFloat8E4M3 : DType::kBFloat16;
    EXPECT_FLOAT_EQ(impl.bmm1_scale(scales, q), golden.at("expected").get<float>()) << golden;
  }
}

TEST(BlockTables, PlanOnceForAStepsLayers) {
  LayerSetup setup;
  Call call(setup, {"decode", {100, 40, 7}, {1, 1, 1}});
  for (int layer = 0; layer < 4; ++layer) call.decode();
  EXPECT_EQ(call.workspace.num_plans(), 1);
  const int64_t warm = folio::testing::num_allocations();
  for (int step = 0; step < 3; ++step) {
    call.seq_lens[0] -= 1;
    for (int layer = 0; layer < 4; ++layer) call.decode();
  }
  EXPECT_EQ(folio::testing::num_allocations(), warm) << "warm calls allocate nothing";
  EXPECT_EQ(call.workspace.num_plans(), 4);
  EXPECT_GT(call.workspace.workspace_size(), 0u);
}

TEST(BlockTables, RefuseCachesThatNoKernelReads) {
  const json document = folio::testing::golden("flashinfer/block_table");
  for (const json& golden : document.at("refused_dtypes")) {
    LayerSetup setup;
    setup.cache_dtype = "fp8";
    setup.quantize_query = true;
    Call call(setup, {"decode", {40, 7}, {1, 1}});
    ASSERT_EQ(golden.at("kv"), "nvfp4");
    call.args.kv_cache.dtype = DType::kFloat4E2M1x2;
    std::vector<std::byte> untouched = call.fixture.out_memory;
    EXPECT_THAT(message_of([&] { call.decode(); }, ErrorCode::kUnsupported), HasSubstr(golden.at("error")));
    EXPECT_EQ(call.fixture.out_memory, untouched);
  }
}

TEST(BlockTables, RefuseDecodesOfUnevenLengths) {
  const json document = folio::testing::golden("flashinfer/block_table");
  for (const json& golden : document.at("uneven")) {
    const int32_t decodes = golden.at("num_decodes");
    const int32_t tokens = golden.at("num_decode_tokens");
    std::vector<int32_t> query_lens(static_cast<size_t>(decodes), 1);
    query_lens.back() = tokens - decodes + 1;
    Call call({}, {"uneven", std::vector<int32_t>(static_cast<size_t>(decodes), 40), query_lens});
    EXPECT_THAT(message_of([&] { call.decode(); }),
                HasSubstr("TRTLLM decode requires uniform query lengths per request. Got " + std::to_string(tokens)));
  }
}

// Queries of verified drafts lie one after the other, as long as each request has them; the rows behind are padding.
TEST(BlockTables, TakeRaggedQueriesByTheirIndptr) {
  const json document = folio::testing::golden("flashinfer/block_table");
  for (const json& golden : document.at("ragged_queries")) {
    SCOPED_TRACE(golden.dump());
    const auto q_lens = golden.at("q_lens").get<std::vector<int32_t>>();
    std::vector<int32_t> seq_lens;
    for (const int32_t q_len : q_lens) seq_lens.push_back(q_len + 20);
    LayerSetup setup;
    const auto indptr = golden.at("indptr").get<std::vector<int32_t>>();
    setup.padding_tokens = golden.at("padded_tokens").get<int32_t>() - indptr.back();
    Call call(setup, {"ragged", seq_lens, q_lens});
    EXPECT_EQ(call.fixture.query_start_loc, indptr);
    call.args.query.shape[0] = call.tokens;  // padding is cut off by the caller
    std::get<TensorView>(call.args.out).shape[0] = call.tokens;
    trtllm_batch_context_with_kv_cache(call.workspace, call.args, indptr, golden.at("max_q_len").get<int32_t>());
    EXPECT_EQ(call.fixture.wrong_output(), "");
    EXPECT_THAT(message_of([&] {
                  trtllm_batch_context_with_kv_cache(call.workspace, call.args, indptr,
                                                     golden.at("max_q_len").get<int32_t>() - 1);
                }),
                HasSubstr("max_q_len is"));
  }
}

TEST(BlockTables, TakeEmptyRequestsAsPadding) {
  LayerSetup setup;
  setup.padding_requests = 2;
  Call call(setup, {"padded", {40, 48}, {5, 7}});
  call.context();
  EXPECT_EQ(call.fixture.wrong_output(), "");
  Call nobody({}, {"nobody", {}, {}});
  nobody.decode();
  nobody.context();
}

TEST(BlockTables, RefuseWhatContradictsItselfAndWriteNothing) {
  const auto refused = [](auto&& change, ErrorCode code = ErrorCode::kInvalidArgument) {
    Call call({}, {"decode", {40, 33}, {1, 1}});
    change(call);
    std::string message = message_of([&] { call.decode(); }, code);
    EXPECT_TRUE(std::ranges::all_of(call.fixture.out_memory, [](std::byte b) { return b == testing::kUnwritten; }));
    return message;
  };
  EXPECT_THAT(refused([](Call& c) { c.args.bmm1_scale = 0.0f; }), HasSubstr("bmm1_scale is 0"));
  EXPECT_THAT(refused([](Call& c) { c.args.bmm2_scale = NAN; }), HasSubstr("bmm2_scale is nan"));
  EXPECT_THAT(refused([](Call& c) { c.args.o_sf_scale = 2.0f; }), HasSubstr("out is no FP4Tensor"));
  EXPECT_THAT(refused([](Call& c) { c.args.max_seq_len = 39; }), HasSubstr("max_seq_len is 39"));
  EXPECT_THAT(refused([](Call& c) {
                c.seq_lens[1] = 1000;
                c.args.max_seq_len = 0;
              }),
              HasSubstr("a row of block_tables"));
  EXPECT_THAT(refused([](Call& c) { c.args.block_tables.num_rows = 1; }), HasSubstr("block_tables has 1 rows"));
  EXPECT_THAT(refused([](Call& c) { c.args.query.shape[0] = 3; }), HasSubstr("uniform query lengths"));
  const auto fp4 = [&](auto&& change) {
    return refused([&](Call& c) {
      FP4Tensor out;
      static std::vector<uint8_t> memory(4096);
      out.data = TensorView(memory.data(), DType::kFloat4E2M1x2, {2, 4, 16});
      out.scale = TensorView(memory.data(), DType::kFloat8E4M3, {128, 8});
      out.original_shape = {2, 4, 32};
      c.args.o_sf_scale = 1.0f;
      change(c, out);
      c.args.out = out;
    });
  };
  EXPECT_THAT(fp4([](Call&, FP4Tensor& t) { t.scale_start_index = 127; }), HasSubstr("at least [256, 8]"));
  EXPECT_THAT(fp4([](Call&, FP4Tensor& t) { t.scale.shape[1] = 4; }), HasSubstr("at least [128, 8]"));
  EXPECT_THAT(fp4([](Call&, FP4Tensor& t) { t.original_shape[2] = 16; }), HasSubstr("original_shape is [2, 4, 16]"));
  EXPECT_THAT(fp4([](Call& c, FP4Tensor&) { c.args.o_sf_scale = 0.0f; }), HasSubstr("o_sf_scale is 0"));
  EXPECT_THAT(fp4([](Call&, FP4Tensor& t) { t.data.shape[2] = 32; }), HasSubstr("must be [2, 4, 16]"));
}

}  // namespace
}  // namespace folio::inline v0::backends
