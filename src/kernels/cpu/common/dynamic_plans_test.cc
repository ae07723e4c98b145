#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/instrumented_test_util.hpp"
#include "kernels/cpu/common/kernel.hpp"
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

/// Keys of all KV heads of each claim of the last run with `recorder`.
struct Claims {
  std::vector<int64_t> keys;
  bool has_keys = true;  ///< of the last claim
};
Claims claims;

void record_claim(const cpu::WorkTileParams&) noexcept {
  if (claims.has_keys) claims.keys.push_back(0);
  claims.has_keys = false;
}
void record_keys(const cpu::WorkTileParams* heads, int32_t num_heads) noexcept {
  claims.keys.back() += int64_t{num_heads} * (heads[0].kv.kv_end - heads[0].kv.kv_begin);
  claims.has_keys = true;
}
void combine_nothing(float*, float*, float*, float, float, const float*, int32_t) noexcept {}

constexpr cpu::Collective kRecorder{
    .load_q = record_claim, .mainloop = record_keys, .combine_states = combine_nothing, .min_rows_of_heads = 1};

/// Whether rows that a row block does not have stood empty in every call since it was set.
bool padding_is_empty = true;

void check_padding(const cpu::WorkTileParams* heads, int32_t num_heads) noexcept {
  for (int32_t h = 0; h < num_heads; ++h) {
    const cpu::SoftmaxState& state = heads[h].state;
    for (int32_t r = heads[h].num_rows; r % cpu::kMaxRowPadding != 0; ++r) {
      padding_is_empty &= std::isinf(state.row_max[r]) && state.row_sum[r] == 0.0f;
    }
  }
}
void load_nothing(const cpu::WorkTileParams&) noexcept {}

constexpr cpu::Collective kPaddingChecker{.load_q = load_nothing,
                                          .mainloop = check_padding,
                                          .combine_states = combine_nothing,
                                          .min_rows_of_heads = 1,
                                          .row_padding = cpu::kMaxRowPadding};

/// `kernel`, computed by kCollective in one worker. (AttentionCase would let a worker claim a part.)
template <const cpu::Collective& kCollective>
AttentionKernel computed_by(const AttentionKernel& kernel) {
  AttentionKernel other = kernel;
  other.run_worker = [](const AttentionParams& params, int32_t worker) noexcept {
    AttentionParams all = params;
    all.plan.num_dynamic_tiles = all.plan.num_work_tiles;
    cpu::run_worker(kCollective, all, worker);
  };
  return other;
}

/// AttentionCase's scratch memory is full of NaN. Denormal numbers there cost an addition a hundred cycles.
TEST_P(DynamicPlansOnCpu, States_OfRowsThatARowBlockLacks_AreEmpty) {
  AttentionConfig config = plain_config();
  config.num_q_heads = 6;
  config.num_kv_heads = 2;
  AttentionCase subject(config, paged_batch({1, 3, 7}, {100, 300, 70}), {}, 1);
  padding_is_empty = true;
  subject.run(computed_by<kPaddingChecker>(*GetParam()), 1);
  EXPECT_TRUE(padding_is_empty);
}

std::vector<int64_t> claimed_keys(const AttentionKernel& kernel, const std::vector<int32_t>& kv_lens) {
  const AttentionKernel recorder = computed_by<kRecorder>(kernel);
  AttentionConfig config = plain_config();
  config.num_q_heads = config.num_kv_heads = 8;
  AttentionCase subject(config, paged_batch(std::vector<int32_t>(kv_lens.size(), 1), kv_lens), {}, 1);
  claims = {};
  subject.run(recorder, 16);
  return claims.keys;
}

TEST_P(DynamicPlansOnCpu, Claim_LongRequest_IsNoMoreThanAWorkersShare) {
  std::vector<int32_t> kv_lens(64, 128);
  const int64_t together = claimed_keys(*GetParam(), kv_lens).front();
  EXPECT_GE(together, 4 * 128) << "KV heads of short requests";
  kv_lens[0] = 16384;
  const std::vector<int64_t> keys = claimed_keys(*GetParam(), kv_lens);
  EXPECT_LE(16 * *std::max_element(keys.begin(), keys.end()), std::accumulate(keys.begin(), keys.end(), int64_t{0}));
}

}  // namespace
}  // namespace folio::inline v0::kernels
