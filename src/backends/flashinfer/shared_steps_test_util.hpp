#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backends/flashinfer/batch_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/backends/cascade.hpp"

namespace folio::inline v0::backends::testing {

/// A shared segment's row: first request, end of requests, first token, end of tokens.
using SharedRun = std::array<int32_t, 4>;
using SharedLevels = std::vector<std::vector<SharedRun>>;

/// A step of tests/golden/backends/shared_steps.json.
struct SharedStep {
  explicit SharedStep(const folio::testing::GoldenCase& golden)
      : lengths{golden.name, golden.ints("seq_lens"), golden.ints("query_lens")},
        levels(golden.data.at("levels").get<SharedLevels>()) {
    for (const auto& start : golden.data.at("starts")) setup.starts.push_back({start[0], start[1]});
  }
  LayerSetup setup;
  BatchLengths lengths;
  SharedLevels levels;
};

inline std::vector<folio::testing::GoldenCase> shared_steps() {
  return folio::testing::golden_cases("backends/shared_steps");
}
/// The first: a system prompt, examples, parallel samples.
inline SharedStep deep_step() {
  return SharedStep(shared_steps().front());
}

/// What metadata says is shared, outermost level first.
inline SharedLevels described(const StepCascadeLevels& found) {
  SharedLevels levels;
  for (int32_t level = 0; level < found.num_levels; ++level) {
    const KvSegment& segment = found.segments[static_cast<size_t>(level)];
    std::vector<SharedRun>& runs = levels.emplace_back();
    for (int32_t row = 0; row < segment.num_groups; ++row) {
      if (segment.kv_len[row] == 0) continue;
      runs.push_back({segment.group_indptr[row], segment.group_indptr[row + 1], segment.first_pos[row],
                      segment.first_pos[row] + segment.kv_len[row]});
    }
  }
  return levels;
}

/// Whether what was found is what is expected. What pays is weighed with the kernel's tiles, and GPUs' kernels have
/// others: there something is found where something is expected.
inline bool found_as_expected(const StepCascadeLevels& found, const SharedLevels& expected) {
  if (folio::testing::on_gpu()) return (found.num_levels > 0) == !expected.empty();
  return described(found) == expected;
}

/// Everything about a layer that a shared prefix could lose, one at a time and together.
inline std::vector<std::string> shared_features() {
  return {"plain", "sinks", "window", "narrow window", "cap", "alibi", "fp8", "fp8 queries", "everything"};
}

/// `setup` with that feature.
inline LayerSetup with_feature(LayerSetup setup, const std::string& feature) {
  const bool everything = feature == "everything";
  setup.sinks = everything || feature == "sinks";
  setup.alibi = everything || feature == "alibi";
  if (everything || feature == "window") setup.sliding_window = 300;  // ends within prefixes
  if (feature == "narrow window") setup.sliding_window = 20;          // no query sees what is shared
  if (everything || feature == "cap") setup.logits_soft_cap = 3.0f;
  if (everything || feature.starts_with("fp8")) {
    setup.cache_dtype = "fp8";
    setup.k_scale = 0.5f;
    setup.v_scale = 2.0f;
    setup.q_scale = 0.25f;
    setup.quantize_query = feature == "fp8 queries";
  }
  return setup;
}

}  // namespace folio::inline v0::backends::testing
