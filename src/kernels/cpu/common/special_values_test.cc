#include <cmath>
#include <limits>

#include "folio/types/float_convert.hpp"
#include "kernels/cpu/common/kernel_fixture_test_util.hpp"
#include "kernels/cpu/common/softmax_cases_test_util.hpp"

/// Infinities and NaN: they stay where they are visible and reach nobody else.
namespace folio::inline v0::kernels {
namespace {

using scheduler::testing::OwnedBatch;
using scheduler::testing::paged_batch;
using testing::AttentionCase;
using testing::kInfinity;
using testing::kNan;
using testing::mask_without;
using testing::overwrite;
using testing::overwrite_kv;
using Result = AttentionCase::Result;

class SpecialValuesInCpuKernels : public CpuKernels {};
INSTANTIATE_TEST_SUITE_P(Isa, SpecialValuesInCpuKernels, ::testing::ValuesIn(every_cpu_kernel()), kernel_test_name);

void expect_tokens(const AttentionConfig& config, const Result& result, int32_t begin, int32_t end,
                   const Result& clean) {
  const int64_t width = int64_t{config.num_q_heads} * config.head_dim_v;
  for (auto i = static_cast<size_t>(begin * width); i < static_cast<size_t>(end * width); ++i) {
    ASSERT_EQ(result.out[i], clean.out[i]) << "token " << static_cast<int64_t>(i) / width;
  }
}

void expect_nan_tokens(const AttentionConfig& config, const Result& result, int32_t begin, int32_t end) {
  const int64_t width = int64_t{config.num_q_heads} * config.head_dim_v;
  for (auto i = static_cast<size_t>(begin * width); i < static_cast<size_t>(end * width); ++i) {
    ASSERT_TRUE(std::isnan(result.out[i])) << "token " << static_cast<int64_t>(i) / width << " is " << result.out[i];
  }
}

/// Queries, caches and dimensions with ways of their own through the kernels.
struct Ways {
  DType q;
  KvFormat format;
  int32_t head_dim;
};
const Ways kWays[] = {{DType::kFloat32, KvFormat::kStrided, 64},
                      {DType::kFloat32, KvFormat::kCpuPacked, 64},
                      {DType::kBFloat16, KvFormat::kStrided, 72},
                      {DType::kBFloat16, KvFormat::kCpuPacked, 72}};

AttentionConfig config_of(const Ways& ways) {
  AttentionConfig config = plain_config(ways.head_dim);
  config.q = ways.q;
  config.kv = DType::kBFloat16;
  config.kv_format = ways.format;
  return config;
}

TEST_P(SpecialValuesInCpuKernels, V_NonFiniteBeyondDiagonal_EarlierRowsUnchanged) {
  for (const Ways& ways : kWays) {
    for (const int32_t q_len : {2, 4, 20}) {  // few rows and many
      for (const float poison : {kNan, kInfinity}) {
        const AttentionConfig config = config_of(ways);
        AttentionCase subject(config, paged_batch({q_len}, {100}), {}, 1);
        const Result clean = subject.run(*GetParam(), 1);
        overwrite(subject, 0, 99, true, poison);
        const Result result = subject.run(*GetParam(), 1);
        expect_tokens(config, result, 0, q_len - 1, clean);
        const size_t last = result.out.size() - 1;
        EXPECT_FALSE(std::isfinite(result.out[last]));
      }
    }
  }
}

TEST_P(SpecialValuesInCpuKernels, K_NonFiniteBeyondDiagonal_EarlierRowsUnchanged) {
  for (const int32_t q_len : {2, 20}) {
    for (const float poison : {kNan, kInfinity, -kInfinity}) {
      const AttentionConfig config = plain_config();
      AttentionCase subject(config, paged_batch({q_len}, {100}), {}, 2);
      const Result clean = subject.run(*GetParam(), 1);
      overwrite(subject, 0, 99, false, poison);
      expect_tokens(config, subject.run(*GetParam(), 1), 0, q_len - 1, clean);
    }
  }
}

TEST_P(SpecialValuesInCpuKernels, Output_VisibleNan_IsNan) {
  for (const bool in_values : {false, true}) {
    for (const int32_t workers : {1, 4}) {
      const AttentionConfig config = plain_config();
      AttentionCase subject(config, paged_batch({1, 1}, {400, 200}), {}, 3);
      const Result clean = subject.run(*GetParam(), workers);
      overwrite(subject, 0, 5, in_values, kNan);
      const Result result = subject.run(*GetParam(), workers);
      expect_nan_tokens(config, result, 0, 1);
      EXPECT_EQ(std::isnan(result.lse[0]), !in_values);
      expect_tokens(config, result, 1, 2, clean);
    }
  }
}

TEST_P(SpecialValuesInCpuKernels, SoftmaxState_OnlyNanVisible_IsNotEmpty) {
  for (const Determinism level : {Determinism::kRunToRun, Determinism::kBatchInvariant}) {
    AttentionConfig config = plain_config();
    config.determinism = level;
    AttentionCase subject(config, paged_batch({1}, {1}), {}, 4);
    overwrite(subject, 0, 0, false, kNan);
    const Result result = subject.run(*GetParam(), 1);
    expect_nan_tokens(config, result, 0, 1);
    EXPECT_TRUE(std::isnan(result.lse[0]));
  }
}

TEST_P(SpecialValuesInCpuKernels, Combine_NanInFixedSplit_IsNan) {
  AttentionConfig config = plain_config();
  config.determinism = Determinism::kBatchInvariant;
  for (const int32_t token : {0, 200, 399}) {
    AttentionCase subject(config, paged_batch({1}, {400}), {}, 5);
    overwrite(subject, 0, token, false, kNan);
    expect_nan_tokens(config, subject.run(*GetParam(), 3), 0, 1);
  }
}

TEST_P(SpecialValuesInCpuKernels, PageTable_PagesBeforeWindow_AreNotRead) {
  for (const Determinism level : {Determinism::kRunToRun, Determinism::kScheduleInvariant}) {
    AttentionConfig config = plain_config();
    config.window_left = 20;
    config.determinism = level;
    AttentionCase subject(config, paged_batch({1, 2}, {300, 190}), {}, 6);
    std::vector<int32_t>& indices = subject.memory()[0].indices;
    const std::vector<int32_t> indptr = subject.memory()[0].indptr;
    const int32_t gone = std::numeric_limits<int32_t>::max();  // an address far outside any memory here
    std::fill_n(indices.begin() + indptr[0], (300 - 21) / 16, gone);
    std::fill_n(indices.begin() + indptr[1], (190 - 22) / 16, gone);
    EXPECT_EQ(subject.compare(subject.run(*GetParam(), 2)), "");
  }
}

TEST_P(SpecialValuesInCpuKernels, Cache_NanBeforeWindow_OutputUnchanged) {
  for (const Ways& ways : kWays) {
    for (const int32_t q_len : {1, 12}) {
      for (const int32_t window : {20, 21}) {  // it begins within a pair of tokens, and between two
        AttentionConfig config = config_of(ways);
        config.window_left = window;
        AttentionCase subject(config, paged_batch({q_len}, {150}), {}, 8);
        for (int32_t token = 0; token < 150 - q_len - window; ++token) {
          overwrite_kv(subject, token, kNan);
        }
        EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "");
      }
    }
  }
}

TEST_P(SpecialValuesInCpuKernels, Cache_NanUnderCustomMask_OutputUnchanged) {
  const std::vector<int32_t> hidden{30, 31, 44, 89};
  for (const Ways& ways : kWays) {
    AttentionConfig config = config_of(ways);
    config.mask = MaskKind::kCustom;
    for (const int32_t q_len : {1, 12}) {
      AttentionCase subject(config, paged_batch({q_len}, {90}), {}, 7);
      const std::vector<uint8_t> bits = mask_without(q_len, 90, hidden);
      subject.mutable_args().custom_mask = bits.data();
      for (const int32_t token : hidden) overwrite_kv(subject, token, kNan);
      EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "");
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::kernels
