// The table of batches_test.cc with the device switched: the same batches, layouts, dtypes and features on a GPU,
// against the same float64 oracle.
#include <gtest/gtest.h>

#include <string>

#include "batch_table.hpp"
#include "device_home.hpp"
#include "folio/types/error.hpp"

namespace folio::backends::testing {
namespace {

using folio::testing::GoldenCase;

bool has_gpu() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

/// Kernels that a GPU has here may not take every dtype of the table.
bool is_no_kernel(const Error& error) {
  return error.code() == ErrorCode::kUnsupported && std::string(error.what()).starts_with("no kernel takes");
}

class BackendBatchesOnGpu : public ::testing::TestWithParam<GoldenCase> {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
  }
};

TEST_P(BackendBatchesOnGpu, MatchFloat64) {
  const Context context = Context::cuda(0);
  int computed = 0;
  int refused = 0;
  for (BatchRun batch_run : batch_runs(GetParam())) {
    SCOPED_TRACE(batch_run.setup.name);
    batch_run.setup.world = 1;  // ranks are a CPU's
    DcpCase whole(for_backend(batch_run.setup, batch_run.kind));
    const auto group = std::move(distributed::make_thread_groups(1).front());
    DeviceHome home;
    try {
      run_backend(whole, batch_run.kind, *group, context, {}, &home);
    } catch (const Error& error) {
      if (!is_no_kernel(error)) throw;
      ++refused;
      continue;
    }
    ++computed;
    EXPECT_EQ(whole.wrong_outputs(), "");
    if (!batch_run.setup.encoder) {
      EXPECT_EQ(whole.wrong_cache(0), "");
    }
  }
  RecordProperty("computed", computed);
  RecordProperty("refused", refused);
  EXPECT_GT(computed, refused / 4);
}

INSTANTIATE_TEST_SUITE_P(Golden, BackendBatchesOnGpu, ::testing::ValuesIn(table_batches()),
                         folio::testing::golden_case_name);

}  // namespace
}  // namespace folio::backends::testing
