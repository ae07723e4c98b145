#pragma once

#include <vector>

#include "backend_step.hpp"

namespace folio::backends::testing {

/// What both backends are run with over every divided cache: one feature at a time, and all of them.
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
  add("schedule-invariant", [](DcpSetup& s) {
    s.determinism = Determinism::kScheduleInvariant, s.cache = DType::kFloat8E4M3, s.sinks = true;
  });
  return setups;
}

}  // namespace folio::backends::testing
