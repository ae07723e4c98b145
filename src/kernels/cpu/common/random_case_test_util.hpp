#pragma once

#include <random>

#include "kernels/cpu/common/attention_case_test_util.hpp"

namespace folio::inline v0::kernels::testing {

/// A random batch of the scheduler's tests, longer, with random dtypes, dims and features.
struct RandomCase {
  AttentionConfig config;
  scheduler::testing::OwnedBatch batch;
  CaseOptions options;
  int32_t num_workers = 1;
  int32_t tile_rows = 0;
};

RandomCase random_case(std::mt19937& random);

}  // namespace folio::inline v0::kernels::testing
