#pragma once

#include <string>
#include <vector>

#include "backend_step.hpp"
#include "core/golden_test.hpp"

namespace folio::backends::testing {

/// One run of a batch: through which backend, and everything that goes with it.
struct BatchRun {
  BackendKind kind = BackendKind::kFlashInfer;
  DcpSetup setup;  ///< its name says every value
};

/// The batches of tests/golden/backends/batches.json: those of decoders and those of encoders.
std::vector<folio::testing::GoldenCase> table_batches();

/// The axes that a batch is run over, in the order of the table: their names and how many values each has.
struct BatchAxes {
  std::vector<std::string> names;
  std::vector<int32_t> num_values;
};
BatchAxes batch_axes(const folio::testing::GoldenCase& batch);

/// Runs of a batch in which every pair of values of two axes occurs; always the same ones.
std::vector<BatchRun> batch_runs(const folio::testing::GoldenCase& batch);

}  // namespace folio::backends::testing
