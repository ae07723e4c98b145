#include "core/instrumented_test_util.hpp"
#include "kernels/cpu/common/kernel_fixture_test_util.hpp"
#include "kernels/cpu/common/softmax_cases_test_util.hpp"

/// Which bits may depend on what: the levels of Determinism, and the order in which partials are combined.
namespace folio::inline v0::kernels {
namespace {

using scheduler::testing::OwnedBatch;
using scheduler::testing::paged_batch;
using testing::all_features;
using testing::AttentionCase;
using testing::run_step;
using Result = AttentionCase::Result;

class InvarianceOfCpuKernels : public CpuKernels {};
INSTANTIATE_TEST_SUITE_P(Isa, InvarianceOfCpuKernels, ::testing::ValuesIn(every_cpu_kernel()), kernel_test_name);

/// What differs between the formats and the ways through the kernel.
struct Layout {
  DType kv;
  KvFormat format;
  DType q = DType::kFloat32;
};
const Layout kLayouts[] = {{DType::kFloat32, KvFormat::kStrided},
                           {DType::kBFloat16, KvFormat::kStrided},
                           {DType::kFloat16, KvFormat::kCpuPacked},
                           {DType::kFloat8E4M3, KvFormat::kCpuPacked},
                           {DType::kBFloat16, KvFormat::kCpuPacked, DType::kBFloat16},
                           {DType::kFloat8E5M2, KvFormat::kStrided, DType::kBFloat16}};

AttentionConfig config_of(const Layout& layout, Determinism determinism) {
  AttentionConfig config = plain_config();
  config.q = layout.q;
  config.kv = layout.kv;
  config.kv_format = layout.format;
  config.determinism = determinism;
  return config;
}

/// Outputs and LSE of tokens [begin, end) of one result and as many of another from `other_begin` on have equal bits.
void expect_equal_tokens(const AttentionConfig& config, const Result& a, int32_t begin, int32_t end, const Result& b,
                         int32_t other_begin) {
  const int64_t width = int64_t{config.num_q_heads} * config.head_dim_v;
  for (int64_t i = 0; i < (end - begin) * width; ++i) {
    ASSERT_EQ(a.out[static_cast<size_t>(begin * width + i)], b.out[static_cast<size_t>(other_begin * width + i)])
        << "token " << begin + i / width << " component " << i % width;
  }
  for (int64_t i = 0; i < int64_t{end - begin} * config.num_q_heads; ++i) {
    ASSERT_EQ(a.lse[static_cast<size_t>(begin * config.num_q_heads + i)],
              b.lse[static_cast<size_t>(other_begin * config.num_q_heads + i)]);
  }
}

TEST_P(InvarianceOfCpuKernels, CombinedPartials_FixedSplits_HaveBitsOfOneWorker) {
  for (const Layout& layout : kLayouts) {
    const AttentionConfig config = config_of(layout, Determinism::kBatchInvariant);
    AttentionCase subject(config, paged_batch({1, 7, 1}, {1500, 700, 64}), all_features(), 1);
    const Result one = subject.run(*GetParam(), 1);
    EXPECT_EQ(one.plan.num_partial_rows, 0);
    for (const int32_t workers : {4, 7, 16}) {
      const Result many = subject.run(*GetParam(), workers);
      EXPECT_GT(many.plan.num_combine_tiles, 0);
      EXPECT_EQ(one.bytes, many.bytes) << workers << " workers";
      EXPECT_EQ(one.lse, many.lse) << workers << " workers";
    }
  }
}

TEST_P(InvarianceOfCpuKernels, RowBits_NeighbourRowsChange_StayEqual) {
  for (const Layout& layout : kLayouts) {
    for (const Determinism level : {Determinism::kRunToRun, Determinism::kScheduleInvariant}) {
      const AttentionConfig config = config_of(layout, level);
      AttentionCase subject(config, paged_batch({1, 40}, {130, 301}), all_features(), 2);
      const Result whole = subject.run(*GetParam(), 1);
      for (const int32_t rows : {1, 2, 3, 4, 5, 7, 8, 13, 31}) {
        const Result tiled = subject.run(*GetParam(), 1, rows);
        EXPECT_EQ(whole.bytes, tiled.bytes) << rows << " rows";
        EXPECT_EQ(whole.lse, tiled.lse) << rows << " rows";
      }
    }
  }
}

/// Work tiles of 8 rows have memory for one head of these at a time; those of the kernel for all six.
TEST_P(InvarianceOfCpuKernels, HeadBits_WalkedTogetherOrAlone_StayEqual) {
  for (const Layout& layout : kLayouts) {
    for (const Determinism level : {Determinism::kRunToRun, Determinism::kBatchInvariant}) {
      AttentionConfig config = config_of(layout, level);
      config.num_q_heads = 12;
      config.num_kv_heads = 6;
      config.window_left = 345;
      AttentionCase subject(config, paged_batch({1, 3, 1}, {500, 300, 61}), all_features(), 6);
      const Result together = subject.run(*GetParam(), 1);
      const Result alone = subject.run(*GetParam(), 1, 8);
      EXPECT_EQ(together.bytes, alone.bytes);
      EXPECT_EQ(together.lse, alone.lse);
      EXPECT_EQ(subject.compare(together), "");
    }
  }
}

TEST_P(InvarianceOfCpuKernels, PromptBits_SplitIntoChunks_StayEqual) {
  for (const Layout& layout : kLayouts) {
    const int32_t length = 200;
    AttentionCase subject(config_of(layout, Determinism::kScheduleInvariant), paged_batch({length}, {length}),
                          all_features(), 3);
    const Result whole = run_step(subject, *GetParam(), 0, length, 1);
    for (const int32_t chunk : {1, 3, 17, 64, 100}) {
      if (folio::testing::kInstrumented && chunk == 3) continue;
      for (int32_t begin = 0; begin < length; begin += chunk) {
        const int32_t end = std::min(begin + chunk, length);
        const Result part = run_step(subject, *GetParam(), begin, end, 3);
        expect_equal_tokens(subject.config(), whole, begin, end, part, 0);
        if (HasFatalFailure()) FAIL() << "chunk of " << chunk << " at " << begin;
        if (chunk == 1) begin += folio::testing::kInstrumented ? 30 : 6;  // a sample of the decode steps
      }
    }
  }
}

TEST_P(InvarianceOfCpuKernels, PromptBits_ChunksWithWindow_StayEqual) {
  AttentionConfig config = config_of(kLayouts[1], Determinism::kScheduleInvariant);
  config.window_left = 75;
  const int32_t length = 200;
  AttentionCase subject(config, paged_batch({length}, {length}), {}, 4);
  const Result whole = run_step(subject, *GetParam(), 0, length, 1);
  for (int32_t begin = 0; begin < length; begin += 33) {
    const int32_t end = std::min(begin + 33, length);
    expect_equal_tokens(config, whole, begin, end, run_step(subject, *GetParam(), begin, end, 2), 0);
  }
}

TEST_P(InvarianceOfCpuKernels, RequestBits_OtherRequestsRemoved_StayEqual) {
  for (const Layout& layout : kLayouts) {
    const AttentionConfig config = config_of(layout, Determinism::kBatchInvariant);
    AttentionCase subject(config, paged_batch({3, 20, 1}, {500, 90, 260}), all_features(), 5);
    const Result together = subject.run(*GetParam(), 4);
    // The same memory with the other requests emptied: their queries become padding of nobody.
    subject.batch().q_len = {3, 0, 0};
    subject.batch().padding_tokens = 21;
    subject.batch().segments[0].kv_len = {500, 0, 0};
    expect_equal_tokens(config, together, 0, 3, subject.run(*GetParam(), 1), 0);
  }
}

}  // namespace
}  // namespace folio::inline v0::kernels
