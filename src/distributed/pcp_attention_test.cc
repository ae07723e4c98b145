// Attention over divided queries against the float64 oracle over the whole batch: every way of dividing and exchanging.
#include <gtest/gtest.h>

#include <tuple>

#include "core/error.hpp"
#include "core/instrumented_test_util.hpp"
#include "distributed/pcp_case_test_util.hpp"

namespace folio::distributed::testing {
namespace {

/// New and old requests, decodes of one and of several tokens, fewer tokens than chunks, several pages of new tokens,
/// requests without tokens.
std::vector<RequestLengths> mixed_requests() {
  return {{5, 1}, {70, 4}, {133, 133}, {33, 1}, {1, 1}, {200, 17}, {40, 0}, {0, 0}, {190, 70}};
}

std::vector<PcpSetup> feature_setups() {
  PcpSetup plain;
  plain.whole.name = "plain";
  plain.whole.requests = mixed_requests();
  std::vector<PcpSetup> setups{plain};
  const auto add = [&](const char* name, auto change) {
    setups.push_back(plain);
    setups.back().whole.name = name;
    change(setups.back().whole);
  };
  add("window", [](DcpSetup& s) { s.window_left = 20; });
  add("a window of two pages", [](DcpSetup& s) { s.window_left = 64; });
  add("window of one", [](DcpSetup& s) { s.window_left = 0; });
  add("chunks", [](DcpSetup& s) { s.attention_chunk = 96; });
  add("ALiBi", [](DcpSetup& s) { s.alibi = true; });
  add("sinks", [](DcpSetup& s) { s.sinks = true; });
  add("soft cap", [](DcpSetup& s) { s.soft_cap = 0.7f; });
  add("no mask", [](DcpSetup& s) { s.mask = MaskKind::kNone; });
  add("no mask, window", [](DcpSetup& s) { s.mask = MaskKind::kNone, s.window_left = 30, s.window_right = 10; });
  add("e4m3", [](DcpSetup& s) {
    s.model = DType::kBFloat16, s.cache = DType::kFloat8E4M3, s.k_scale = 0.5f, s.v_scale = 2.0f;
  });
  add("e5m2", [](DcpSetup& s) { s.model = DType::kFloat16, s.cache = DType::kFloat8E5M2, s.k_scale = 2.0f; });
  add("bfloat16, everything", [](DcpSetup& s) {
    s.model = s.cache = DType::kBFloat16;
    s.window_left = 90, s.alibi = s.sinks = true, s.soft_cap = 2.0f;
  });
  add("packed", [](DcpSetup& s) { s.model = s.cache = DType::kBFloat16; });
  setups.back().packed = true;
  add("one KV head", [](DcpSetup& s) { s.kv_heads = 1, s.dim_v = 16; });
  add("as many KV heads", [](DcpSetup& s) { s.kv_heads = 4; });
  add("fp8 queries", [](DcpSetup& s) {
    s.model = DType::kBFloat16, s.cache = s.query = DType::kFloat8E4M3;
    s.q_granularity = ScaleGranularity::kPerHead, s.q_scales = {0.5f, 3.0f};
  });
  add("a q scale per request", [](DcpSetup& s) {
    s.model = DType::kBFloat16, s.cache = s.query = DType::kFloat8E4M3, s.k_scale = 0.5f;
    s.q_granularity = ScaleGranularity::kPerRequest;
    s.q_scales = {1.0f, 0.5f, 2.0f, 3.0f, 0.25f, 1.5f, 4.0f, 0.75f, 1.25f};
  });
  add("a q scale per request and head", [](DcpSetup& s) {
    s.model = DType::kBFloat16, s.cache = s.query = DType::kFloat8E4M3, s.v_scale = 2.0f;
    s.q_granularity = ScaleGranularity::kPerRequestAndHead;
    for (int32_t i = 0; i < 18; ++i) s.q_scales.push_back(0.25f * static_cast<float>(i + 1));
  });
  add("batch-invariant", [](DcpSetup& s) { s.determinism = Determinism::kBatchInvariant; });
  add("new requests only", [](DcpSetup& s) { s.requests = {{3, 3}, {77, 77}}; });
  add("one new token", [](DcpSetup& s) { s.requests = {{150, 1}}; });
  add("one token in all", [](DcpSetup& s) { s.requests = {{1, 1}}; });
  return setups;
}

using Division = std::tuple<int32_t, int32_t, PcpExchange>;  ///< world, interleave, exchange

class PcpAttentionOverDivisions : public ::testing::TestWithParam<Division> {};

TEST_P(PcpAttentionOverDivisions, EqualsTheUndividedBatch) {
  int32_t number = 0;
  for (PcpSetup setup : feature_setups()) {
    std::tie(setup.whole.world, setup.whole.interleave, setup.exchange) = GetParam();
    setup.whole.hnd = number++ % 2 == 1;
    if (folio::testing::kInstrumented && setup.whole.world == 4 && number % 2 == 0) continue;
    PcpCase divided(setup);
    divided.run_in_threads();
    EXPECT_EQ(divided.wrong_outputs(), "");
  }
}

/// With bounds a rank's rows are padded to as many as the engine says, and older tokens are reached by pass-Q.
TEST(PcpAttention, WithinBoundsEqualsTheUndividedBatch) {
  for (PcpSetup setup : feature_setups()) {
    setup.whole.world = 3;
    setup.bounds = GraphBounds{10, 300, 140, 256, 0};
    const PcpCase unpadded(setup);
    setup.max_tokens = max_pcp_tokens(unpadded.whole.cu_q, 3) + 5;
    PcpCase divided(setup);
    divided.run_in_threads();
    EXPECT_EQ(divided.wrong_outputs(), "");
    EXPECT_EQ(divided.ranks[1].exchange, PcpExchange::kPassQ);
  }
}

std::string division_name(const ::testing::TestParamInfo<Division>& test) {
  const PcpExchange exchange = std::get<2>(test.param);
  return core::message("W", std::get<0>(test.param), "I", std::get<1>(test.param),
                       exchange == PcpExchange::kPassQ ? "_pass_q" : "_pass_kv");
}

// 32 is the page size.
INSTANTIATE_TEST_SUITE_P(Divisions, PcpAttentionOverDivisions,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Values(1, 4, 32),
                                            ::testing::Values(PcpExchange::kPassQ, PcpExchange::kPassKv)),
                         division_name);

}  // namespace
}  // namespace folio::distributed::testing
