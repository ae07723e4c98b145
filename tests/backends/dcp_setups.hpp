#pragma once

#include <vector>

#include "backend_step.hpp"

namespace folio::backends::testing {

/// What both backends are run with over every divided cache: one feature at a time, and all of them.
/// (FlashAttention, which alone has them: cross_setups.)
inline std::vector<DcpSetup> dcp_setups(int32_t world, int32_t interleave) {
  DcpSetup plain;
  plain.name = "plain";
  plain.world = world;
  plain.interleave = interleave;
  plain.model = plain.cache = DType::kBFloat16;
  plain.requests = {{70, 1}, {33, 1}, {1, 1}, {65, 4}, {40, 40}, {131, 17}, {0, 0}};
  std::vector<DcpSetup> setups{plain};
  const auto add = [&](const char* name, auto change) {
    setups.push_back(plain);
    setups.back().name = name;
    change(setups.back());
  };
  add("float32", [](DcpSetup& s) { s.model = s.cache = DType::kFloat32; });
  add("window", [](DcpSetup& s) { s.window_left = 20; });
  add("ALiBi", [](DcpSetup& s) { s.alibi = true; });
  add("sinks", [](DcpSetup& s) { s.sinks = true; });
  add("soft cap", [](DcpSetup& s) { s.soft_cap = 0.7f; });
  add("everything", [](DcpSetup& s) { s.window_left = 50, s.alibi = s.sinks = true, s.soft_cap = 2.0f; });
  add("e4m3", [](DcpSetup& s) { s.cache = DType::kFloat8E4M3, s.k_scale = 0.5f, s.v_scale = 2.0f; });
  add("e5m2", [](DcpSetup& s) { s.cache = DType::kFloat8E5M2, s.k_scale = 2.0f, s.sinks = true; });
  add("batch-invariant", [](DcpSetup& s) { s.determinism = Determinism::kBatchInvariant; });
  add("replicated queries", [](DcpSetup& s) { s.replicated_queries = s.alibi = s.sinks = true; });
  add("results of all heads",
      [](DcpSetup& s) { s.replicated_queries = s.all_heads_out = s.alibi = s.sinks = true, s.window_left = 50; });
  add("results of all heads, e4m3", [](DcpSetup& s) {
    s.replicated_queries = s.all_heads_out = true, s.cache = DType::kFloat8E4M3, s.k_scale = 0.5f, s.v_scale = 2.0f;
  });
  add("a q scale per head", [](DcpSetup& s) {
    s.query = s.cache = DType::kFloat8E4M3, s.k_scale = 0.5f, s.v_scale = 2.0f, s.window_left = 20, s.sinks = true;
    s.q_granularity = ScaleGranularity::kPerHead, s.q_scales = {0.5f, 3.0f};
  });
  add("a q scale per request and head, replicated queries", [](DcpSetup& s) {
    s.query = s.cache = DType::kFloat8E4M3, s.replicated_queries = s.alibi = true;
    s.q_granularity = ScaleGranularity::kPerRequestAndHead;
    for (int32_t i = 0; i < 14; ++i) s.q_scales.push_back(0.25f * static_cast<float>(i + 1));
  });
  add("schedule-invariant", [](DcpSetup& s) {
    s.determinism = Determinism::kScheduleInvariant, s.cache = DType::kFloat8E4M3, s.sinks = true;
  });
  return setups;
}

/// Cross attention: more queries than keys, no keys and no queries among them. On the first call the step writes the
/// keys of the encoder.
inline std::vector<DcpSetup> cross_setups(int32_t world, int32_t interleave) {
  std::vector<DcpSetup> setups;
  for (DcpSetup& setup : dcp_setups(world, interleave)) {
    setup.name = "cross attention, " + setup.name;
    setup.cross = true;
    setup.requests = {{70, 1}, {3, 9}, {0, 4}, {131, 17}, {40, 0}, {33, 33}, {5, 1}};
    setups.push_back(setup);
  }
  return setups;
}

}  // namespace folio::backends::testing
