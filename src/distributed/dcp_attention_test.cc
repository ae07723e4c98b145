// Attention over a divided cache against the float64 oracle over the whole one: every way of dividing and combining.
#include <gtest/gtest.h>

#include <tuple>

#include "core/error.hpp"
#include "core/instrumented_test_util.hpp"
#include "distributed/dcp_case_test_util.hpp"

namespace folio::distributed::testing {
namespace {

/// Lengths around pages and stripes, new and old requests, decodes of one and of several tokens, padding. Several leave
/// some rank without a key.
std::vector<RequestLengths> mixed_requests() {
  return {{5, 1}, {70, 4}, {33, 1}, {1, 1}, {64, 17}, {40, 40}, {0, 0}, {131, 2}};
}

std::vector<DcpSetup> feature_setups() {
  DcpSetup plain;
  plain.name = "plain";
  plain.requests = mixed_requests();
  std::vector<DcpSetup> setups{plain};
  const auto add = [&](const char* name, auto change) {
    setups.push_back(plain);
    setups.back().name = name;
    change(setups.back());
  };
  add("all cached", [](DcpSetup& s) { s.num_cached = 8; });
  add("decodes cached", [](DcpSetup& s) { s.num_cached = 3; });
  add("window", [](DcpSetup& s) { s.window_left = 20, s.num_cached = 2; });
  add("window of one", [](DcpSetup& s) { s.window_left = 0, s.num_cached = 8; });
  add("ALiBi", [](DcpSetup& s) { s.alibi = true, s.num_cached = 2; });
  add("sinks", [](DcpSetup& s) { s.sinks = true, s.num_cached = 2; });
  add("sinks, all cached", [](DcpSetup& s) { s.sinks = true, s.num_cached = 8; });
  add("soft cap", [](DcpSetup& s) { s.soft_cap = 0.7f; });
  add("no mask", [](DcpSetup& s) { s.mask = MaskKind::kNone; });
  add("e4m3", [](DcpSetup& s) {
    s.model = DType::kBFloat16, s.cache = DType::kFloat8E4M3, s.k_scale = 0.5f, s.v_scale = 2.0f, s.num_cached = 3;
  });
  add("e5m2",
      [](DcpSetup& s) { s.model = DType::kFloat16, s.cache = DType::kFloat8E5M2, s.k_scale = 2.0f, s.num_cached = 8; });
  add("bfloat16, everything", [](DcpSetup& s) {
    s.model = s.cache = DType::kBFloat16;
    s.window_left = 40, s.alibi = s.sinks = true, s.soft_cap = 2.0f, s.num_cached = 2;
  });
  const auto halved = [](DcpSetup& s, DType dtype) { s.model = s.cache = s.partial = dtype; };
  add("bfloat16 partial results", [&](DcpSetup& s) { halved(s, DType::kBFloat16), s.num_cached = 3; });
  add("bfloat16 partial results, everything", [&](DcpSetup& s) {
    halved(s, DType::kBFloat16), s.window_left = 40, s.alibi = s.sinks = true, s.soft_cap = 2.0f, s.num_cached = 2;
  });
  add("float16 partial results, replicated queries",
      [&](DcpSetup& s) { halved(s, DType::kFloat16), s.replicated_queries = true, s.num_cached = 8; });
  add("bfloat16 partial results of all heads", [&](DcpSetup& s) {
    halved(s, DType::kBFloat16), s.replicated_queries = s.all_heads_out = s.sinks = true, s.num_cached = 3;
  });
  add("bfloat16 partial results of fp8 queries", [](DcpSetup& s) {
    s.model = s.partial = DType::kBFloat16, s.cache = s.query = DType::kFloat8E4M3, s.num_cached = 8;
  });
  add("one KV head", [](DcpSetup& s) { s.kv_heads = 1, s.dim_v = 16; });
  add("replicated queries", [](DcpSetup& s) { s.replicated_queries = s.alibi = s.sinks = true; });
  add("replicated queries, one KV head", [](DcpSetup& s) { s.replicated_queries = s.alibi = true, s.kv_heads = 1; });
  // With a batch whose every request is cached and with one whose none is.
  add("results of all heads", [](DcpSetup& s) { s.replicated_queries = s.all_heads_out = s.alibi = s.sinks = true; });
  add("results of all heads, all cached", [](DcpSetup& s) {
    s.replicated_queries = s.all_heads_out = s.sinks = true, s.window_left = 20, s.num_cached = 8;
  });
  add("results of all heads, one KV head",
      [](DcpSetup& s) { s.replicated_queries = s.all_heads_out = s.sinks = true, s.kv_heads = 1; });
  const auto fp8_queries = [](DcpSetup& s) {
    s.model = DType::kBFloat16, s.cache = s.query = DType::kFloat8E4M3;
    s.num_cached = 8, s.k_scale = 0.5f, s.v_scale = 2.0f;
  };
  add("a q scale per head", [&](DcpSetup& s) {
    fp8_queries(s), s.q_granularity = ScaleGranularity::kPerHead, s.q_scales = {0.5f, 3.0f};
  });
  add("a q scale per request", [&](DcpSetup& s) {
    fp8_queries(s), s.q_granularity = ScaleGranularity::kPerRequest, s.sinks = true;
    s.q_scales = {1.0f, 0.5f, 2.0f, 3.0f, 0.25f, 1.5f, 4.0f, 0.75f};
  });
  add("a q scale per request and head", [&](DcpSetup& s) {
    fp8_queries(s), s.q_granularity = ScaleGranularity::kPerRequestAndHead, s.replicated_queries = s.alibi = true;
    for (int32_t i = 0; i < 16; ++i) s.q_scales.push_back(0.25f * static_cast<float>(i + 1));
  });
  const auto cross = [](DcpSetup& s) {
    s.cross = true, s.mask = MaskKind::kNone, s.num_cached = 6;
    // More queries than keys, no keys and no queries among them.
    s.requests = {{70, 1}, {3, 9}, {0, 4}, {131, 17}, {40, 0}, {33, 33}};
  };
  add("cross attention", [&](DcpSetup& s) { cross(s); });
  add("cross attention, window", [&](DcpSetup& s) { cross(s), s.window_left = 20, s.window_right = 0; });
  add("cross attention, everything", [&](DcpSetup& s) {
    cross(s), s.model = DType::kBFloat16, s.cache = DType::kFloat8E4M3, s.k_scale = 0.5f, s.v_scale = 2.0f;
    s.alibi = s.sinks = true, s.soft_cap = 2.0f;
  });
  add("cross attention, results of all heads",
      [&](DcpSetup& s) { cross(s), s.replicated_queries = s.all_heads_out = s.sinks = true; });
  add("batch-invariant", [](DcpSetup& s) { s.determinism = Determinism::kBatchInvariant; });
  add("schedule-invariant", [](DcpSetup& s) { s.determinism = Determinism::kScheduleInvariant, s.num_cached = 8; });
  add("new requests only", [](DcpSetup& s) { s.requests = {{3, 3}, {17, 17}}; });
  add("one token on one rank", [](DcpSetup& s) { s.requests = {{2, 1}}; });
  return setups;
}

using Division = std::tuple<int32_t, int32_t, DcpCombine>;  ///< world, interleave, combine

/// Half of them under sanitizers, which look for other mistakes than wrong sums.
std::vector<int32_t> interleaves() {
  if (folio::testing::kInstrumented) return {1, 16};
  return {1, 2, 16, 32};
}

class DcpAttentionOverDivisions : public ::testing::TestWithParam<Division> {};

TEST_P(DcpAttentionOverDivisions, EqualsTheUndividedCache) {
  int32_t number = 0;
  for (DcpSetup setup : feature_setups()) {
    std::tie(setup.world, setup.interleave, setup.combine) = GetParam();
    if (setup.all_heads_out) setup.combine = DcpCombine::kAllGatherReduceScatter;  // the other leaves each its own
    if (folio::testing::kInstrumented && setup.world == 4 && number++ % 2 == setup.interleave % 2) continue;
    for (const bool hnd : {false, true}) {
      if (folio::testing::kInstrumented && hnd == (setup.interleave > 2)) continue;
      setup.hnd = hnd;
      DcpCase whole(setup);
      whole.run_in_threads();
      EXPECT_EQ(whole.wrong_outputs(), "") << (hnd ? "HND" : "NHD");
    }
  }
}

std::string division_name(const ::testing::TestParamInfo<Division>& test) {
  return core::message("W", std::get<0>(test.param), "I", std::get<1>(test.param), "_",
                       to_string(std::get<2>(test.param)));
}

// 32 is the page size.
INSTANTIATE_TEST_SUITE_P(Divisions, DcpAttentionOverDivisions,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::ValuesIn(interleaves()),
                                            ::testing::Values(DcpCombine::kAllGatherReduceScatter,
                                                              DcpCombine::kAllToAll)),
                         division_name);

}  // namespace
}  // namespace folio::distributed::testing
