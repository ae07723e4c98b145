#include "batch_table.hpp"

#include <cmath>
#include <map>
#include <stdexcept>

#include "core/instrumented_test_util.hpp"
#include "covering_design.hpp"

namespace folio::backends::testing {
namespace {

using folio::testing::golden;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using nlohmann::json;

constexpr const char* kTable = "backends/batches";
constexpr size_t kInstrumentedRuns = 2;  // of each batch: sanitizers look for other mistakes than wrong sums

/// [n, list]: the list n times.
std::vector<int32_t> repeated(const json& entry) {
  std::vector<int32_t> values;
  for (int32_t i = 0; i < entry.at(0).get<int32_t>(); ++i) {
    const auto once = entry.at(1).get<std::vector<int32_t>>();
    values.insert(values.end(), once.begin(), once.end());
  }
  return values;
}

/// Of every axis its values: the table's, or the batch's own.
json axes_of(const GoldenCase& batch) {
  json axes = golden(kTable).at("axes");
  if (batch.data.contains("axes")) axes.update(batch.data.at("axes"));
  return axes;
}

/// A number of the batch, or the table's.
json value_of(const GoldenCase& batch, const char* field) {
  if (batch.data.contains(field)) return batch.data.at(field);
  return golden(kTable).at("values").at(field);
}

DcpSetup setup_of(const GoldenCase& batch) {
  DcpSetup setup;
  const std::vector<int32_t> seq_lens = repeated(batch.data.at("seq_lens"));
  const std::vector<int32_t> query_lens =
      batch.data.contains("query_lens") ? repeated(batch.data.at("query_lens")) : seq_lens;
  for (size_t i = 0; i < seq_lens.size(); ++i) setup.requests.push_back({seq_lens.at(i), query_lens.at(i)});
  setup.encoder = !batch.data.contains("query_lens");
  if (setup.encoder) setup.mask = MaskKind::kNone;
  setup.sampled_rows = 16;  // of each rank
  setup.padding_slots = 2;
  return setup;
}

void apply_feature(const GoldenCase& batch, const std::string& name, DcpSetup& setup) {
  const json feature = golden(kTable).at("features").at(name);
  setup.query_amplitude = feature.value("query_amplitude", 1.0f);
  setup.alibi = feature.value("alibi", false);
  if (feature.contains("sinks")) {
    setup.sinks = true;
    setup.sink_range = value_of(batch, feature.at("sinks").get<std::string>().c_str()).get<std::array<float, 2>>();
  }
  if (feature.value("soft_cap", false)) setup.soft_cap = value_of(batch, "soft_cap").get<float>();
  if (feature.value("window", false)) {
    setup.window_left = value_of(batch, "window").get<int32_t>() - 1;
    if (setup.encoder) setup.window_right = setup.window_left;
  }
}

void apply(const GoldenCase& batch, const std::string& axis, const json& value, BatchRun& run) {
  DcpSetup& setup = run.setup;
  if (axis == "backend") {
    run.kind = value == "flashinfer" ? BackendKind::kFlashInfer : BackendKind::kFlashAttention;
  } else if (axis == "layout") {
    setup.hnd = value == "HND";
  } else if (axis == "cache") {
    if (value == "auto") return;
    setup.cache = value == "fp8_e4m3" ? DType::kFloat8E4M3 : DType::kFloat8E5M2;
    setup.k_scale = 0.5f;
    setup.v_scale = 2.0f;
  } else if (axis == "model") {
    setup.model = value == "float16" ? DType::kFloat16 : DType::kBFloat16;
    if (!is_fp8(setup.cache)) setup.cache = setup.model;
  } else if (axis == "feature") {
    apply_feature(batch, value.get<std::string>(), setup);
  } else if (axis == "world") {
    setup.world = value.get<int32_t>();
  } else if (axis == "combine") {
    setup.combine = distributed::dcp_combine_from_name(value.get<std::string>(), 2);
  } else if (axis == "interleave") {
    setup.interleave = value.get<int32_t>();
  } else if (axis == "page_size") {
    setup.page_size = value.get<int32_t>();
  } else if (axis == "heads") {
    setup.heads = value.at(0).get<int32_t>();
    setup.kv_heads = value.at(1).get<int32_t>();
  } else if (axis == "head_size") {
    setup.dim_qk = setup.dim_v = value.get<int32_t>();
    if (batch.value("kv_over_sqrt_head_size", false)) setup.kv_amplitude = 1.0f / std::sqrt(value.get<float>());
  } else {
    throw std::runtime_error("the table of batches has an axis '" + axis + "' that no test applies");
  }
}

}  // namespace

std::vector<GoldenCase> table_batches() {
  std::vector<GoldenCase> batches = golden_cases(kTable, "decoder");
  for (const GoldenCase& encoder : golden_cases(kTable, "encoder")) batches.push_back(encoder);
  return batches;
}

BatchAxes batch_axes(const GoldenCase& batch) {
  BatchAxes axes;
  const json values = axes_of(batch);
  for (const auto& [name, of_axis] : values.items()) {
    axes.names.push_back(name);
    axes.num_values.push_back(static_cast<int32_t>(of_axis.size()));
  }
  return axes;
}

std::vector<BatchRun> batch_runs(const GoldenCase& batch) {
  const json values = axes_of(batch);
  const BatchAxes axes = batch_axes(batch);
  uint64_t seed = 1;
  for (const char character : batch.name) seed = seed * 31 + static_cast<uint8_t>(character);
  std::vector<BatchRun> runs;
  for (const DesignRow& row : covering_design(axes.num_values, seed)) {
    if (folio::testing::kInstrumented && runs.size() == kInstrumentedRuns) break;
    BatchRun run{BackendKind::kFlashInfer, setup_of(batch)};
    run.setup.name = batch.name;
    for (size_t axis = 0; axis < axes.names.size(); ++axis) {
      const json& value = values.at(axes.names[axis]).at(static_cast<size_t>(row[axis]));
      apply(batch, axes.names[axis], value, run);
      run.setup.name += ", " + axes.names[axis] + " " + value.dump();
    }
    run.setup = for_backend(run.setup, run.kind);
    runs.push_back(run);
  }
  return runs;
}

}  // namespace folio::backends::testing
