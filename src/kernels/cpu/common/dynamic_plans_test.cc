#include <random>

#include "core/instrumented_test_util.hpp"
#include "kernels/cpu/common/kernel_fixture_test_util.hpp"
#include "kernels/cpu/common/random_case_test_util.hpp"

/// Work tiles that workers claim, whichever of them claims which.
namespace folio::inline v0::kernels {
namespace {

using scheduler::testing::paged_batch;
using testing::AttentionCase;
using testing::RandomCase;
using Result = AttentionCase::Result;

class DynamicPlansOnCpu : public CpuKernels {};
INSTANTIATE_TEST_SUITE_P(Isa, DynamicPlansOnCpu, ::testing::ValuesIn(every_cpu_kernel()), kernel_test_name);

TEST_P(DynamicPlansOnCpu, Output_AnyClaimOrder_MatchesReference) {
  std::mt19937 random(20260202);
  int merged = 0;
  for (int i = 0; i < folio::testing::random_cases(60); ++i) {
    const RandomCase one = testing::random_case(random);
    AttentionCase subject(one.config, one.batch, one.options, static_cast<uint32_t>(i));
    subject.set_claims(static_cast<uint32_t>(i));
    const Result first = subject.run(*GetParam(), 1 + one.num_workers, one.tile_rows);
    ASSERT_EQ(subject.compare(first), "") << "case " << i;
    merged += first.plan.num_combine_tiles > 0 ? 1 : 0;
    subject.set_claims(static_cast<uint32_t>(i) + 1000);
    ASSERT_EQ(subject.run(*GetParam(), 1 + one.num_workers, one.tile_rows).bytes, first.bytes) << "case " << i;
  }
  EXPECT_GT(merged, folio::testing::random_cases(10));
}

TEST_P(DynamicPlansOnCpu, OutputBits_FixedSplits_EqualThoseOfOneWorker) {
  for (const Determinism level : {Determinism::kBatchInvariant, Determinism::kScheduleInvariant}) {
    AttentionConfig config = plain_config();
    config.determinism = level;
    testing::CaseOptions options;
    options.soft_cap = options.alibi = options.sinks = true;
    AttentionCase subject(config, paged_batch({1, 7, 1}, {1500, 700, 64}), options, 1);
    const Result fixed = subject.run(*GetParam(), 1);
    subject.set_claims(5);
    for (const int32_t workers : {1, 4, 16}) {
      const Result dynamic = subject.run(*GetParam(), workers);
      EXPECT_EQ(dynamic.plan.num_combine_tiles > 0, workers > 1);
      EXPECT_EQ(dynamic.bytes, fixed.bytes) << workers << " workers";
      EXPECT_EQ(dynamic.lse, fixed.lse) << workers << " workers";
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::kernels
