#include <algorithm>
#include <cmath>
#include <random>

#include "core/instrumented_test_util.hpp"
#include "kernels/cpu/common/kernel_fixture_test_util.hpp"
#include "kernels/cpu/common/random_case_test_util.hpp"
#include "kernels/cpu/common/softmax_cases_test_util.hpp"
#include "scheduler/batch.hpp"

namespace folio::inline v0::kernels {
namespace {

using scheduler::testing::OwnedBatch;
using scheduler::testing::paged_batch;
using testing::AttentionCase;
using testing::CaseOptions;
using testing::lengthen_row;
using testing::random_case;
using testing::RandomCase;
using Result = AttentionCase::Result;

INSTANTIATE_TEST_SUITE_P(Isa, CpuKernels, ::testing::ValuesIn(every_cpu_kernel()), kernel_test_name);

TEST_P(CpuKernels, Output_RandomCases_MatchesReference) {
  std::mt19937 random(20260101);
  for (int i = 0; i < folio::testing::random_cases(300); ++i) {
    const RandomCase one = random_case(random);
    AttentionCase subject(one.config, one.batch, one.options, static_cast<uint32_t>(i));
    ASSERT_EQ(GetParam()->refusal(one.config), "");
    const std::string problem = subject.compare(subject.run(*GetParam(), one.num_workers, one.tile_rows));
    ASSERT_EQ(problem, "") << "case " << i << ": q " << to_string(one.config.q) << " kv " << to_string(one.config.kv)
                           << " ragged " << to_string(one.config.ragged_kv) << " out " << to_string(one.config.out)
                           << " dims " << one.config.head_dim_qk << "/" << one.config.head_dim_v << " page "
                           << one.config.page_size << " packed " << (one.config.kv_format == KvFormat::kCpuPacked)
                           << " mask " << static_cast<int>(one.config.mask) << " determinism "
                           << static_cast<int>(one.config.determinism);
  }
}

/// One decode, one verification and one prefill request, each over several tiles.
OwnedBatch mixed_batch() {
  return paged_batch({1, 5, 40}, {150, 70, 129});
}

/// Every key counts the same and every value is equal, so the result is known, and errors of sums add up.
TEST_P(CpuKernels, Output_EqualValuesOverLongContext_DoesNotDrift) {
  constexpr float kValue = 0.3f;
  constexpr int32_t kKeys = folio::testing::kInstrumented ? 1 << 17 : 1 << 20;
  // Additions that a key's share passes: of 64 in its KV tile, of 256 tiles in its state, and of states.
  constexpr double kAdditions = 64 + 256 + kKeys / 16384;
  constexpr double kBound = (kAdditions + 8) * 0x1p-24;
  for (const int32_t q_len : {1, 9}) {  // V straight from the cache, and upcast
    AttentionConfig config = plain_config(16);
    config.num_q_heads = config.num_kv_heads = 1;
    config.mask = MaskKind::kNone;
    config.page_size = 8192;
    AttentionCase subject(config, paged_batch({q_len}, {config.page_size}), {}, 1);
    subject.mutable_args().sm_scale = 1e-30f;
    std::vector<SegmentArgs> args;
    lengthen_row(subject, kKeys, args);
    std::fill_n(static_cast<float*>(args[0].cache.v), args[0].cache.num_pages * args[0].cache.v_strides.page, kValue);
    const double expected = double{kValue} * double{args[0].v_scale.value};
    const Result result = subject.run(*GetParam(), 1);
    for (const float value : result.out) ASSERT_NEAR(value, expected, kBound * expected) << q_len;
    for (const float lse : result.lse) ASSERT_NEAR(lse, std::log(double{kKeys}), kBound + 16 * 0x1p-24) << q_len;
  }
}

TEST_P(CpuKernels, LongestRow_WindowAtItsEnd_HasBitsOfShortRow) {
  for (const int32_t q_len : {1, 20}) {
    AttentionConfig config = plain_config(16);
    config.page_size = 8192;
    config.window_left = 100;
    const int32_t length = scheduler::kMaxKvLen % config.page_size;
    AttentionCase subject(config, paged_batch({q_len}, {length}), {}, 1);
    const Result expected = subject.run(*GetParam(), 1);
    ASSERT_EQ(subject.compare(expected), "");
    std::vector<SegmentArgs> args;
    lengthen_row(subject, scheduler::kMaxKvLen, args);
    EXPECT_EQ(subject.run(*GetParam(), 1).bytes, expected.bytes) << q_len;
  }
}

TEST_P(CpuKernels, TakeTheHeadDimensionsOfMla) {
  AttentionConfig config = plain_config(576);
  config.head_dim_v = 512;
  config.num_q_heads = 16;
  config.num_kv_heads = 1;
  config.q = config.kv = config.ragged_kv = config.out = DType::kBFloat16;
  CaseOptions options;
  options.v_aliases_k = true;
  AttentionCase subject(config, folio::testing::kInstrumented ? paged_batch({1, 3}, {40, 70}) : mixed_batch(), options,
                        1);
  ASSERT_EQ(GetParam()->refusal(config), "");
  EXPECT_EQ(subject.compare(subject.run(*GetParam(), 3)), "");
}

TEST_P(CpuKernels, TakeUnequalHeadDimensions) {
  AttentionConfig config = plain_config(192);
  config.head_dim_v = 128;
  AttentionCase subject(config, mixed_batch(), {}, 2);
  EXPECT_EQ(subject.compare(subject.run(*GetParam(), 2)), "");
}

TEST_P(CpuKernels, TakeEveryHeadDimension) {
  for (int32_t dim = 8; dim <= 256; dim += folio::testing::kInstrumented ? 40 : 8) {
    AttentionConfig config = plain_config(dim);
    config.head_dim_v = 264 - dim;
    config.kv = DType::kBFloat16;
    config.kv_format = dim % 16 == 0 ? KvFormat::kCpuPacked : KvFormat::kStrided;
    AttentionCase subject(config, paged_batch({1, 3}, {70, 65}), {}, static_cast<uint32_t>(dim));
    ASSERT_EQ(subject.compare(subject.run(*GetParam(), 1)), "") << dim;
  }
}

TEST_P(CpuKernels, TakeEveryGroupSize) {
  for (const int32_t group : {1, 2, 3, 5, 7, 8, 9, 12, 71}) {
    AttentionConfig config = plain_config(32);
    config.num_kv_heads = 1;
    config.num_q_heads = group;
    AttentionCase subject(config, paged_batch({1, 2}, {100, 130}), {}, static_cast<uint32_t>(group));
    ASSERT_EQ(subject.compare(subject.run(*GetParam(), 2)), "") << group;
  }
}

TEST_P(CpuKernels, Softmax_LargeLogits_IsFinite) {
  AttentionConfig config = plain_config();
  CaseOptions options;
  options.magnitude = 30.0f;  // logits of thousands
  AttentionCase subject(config, mixed_batch(), options, 3);
  EXPECT_EQ(subject.compare(subject.run(*GetParam(), 3)), "");
}

TEST_P(CpuKernels, SayWhatTheyRefuseAndWhatTheyTake) {
  const auto refusal = [&](auto change) {
    AttentionConfig config = plain_config();
    change(config);
    return GetParam()->refusal(config);
  };
  const auto expect = [](const std::string& text, const char* given, const char* offered) {
    EXPECT_NE(text.find(given), std::string::npos) << text;
    EXPECT_NE(text.find(offered), std::string::npos) << text;
  };
  EXPECT_EQ(refusal([](AttentionConfig&) {}), "");
  expect(refusal([](AttentionConfig& c) { c.head_dim_qk = 100; }), "head_dim_qk is 100", "multiples of 8 up to 576");
  expect(refusal([](AttentionConfig& c) { c.head_dim_v = 520; }), "head_dim_v is 520", "multiples of 8 up to 512");
  expect(refusal([](AttentionConfig& c) { c.q = DType::kFloat4E2M1x2; }), "q is fp4_e2m1x2", "fp8_e5m2");
  expect(refusal([](AttentionConfig& c) { c.kv = DType::kFloat4E2M1x2; }), "kv is fp4_e2m1x2", "fp8_e5m2");
  expect(refusal([](AttentionConfig& c) { c.ragged_kv = DType::kFloat4E2M1x2; }), "ragged_kv is", "fp8_e5m2");
  expect(refusal([](AttentionConfig& c) { c.out = DType::kUnset; }), "out is unset", "fp4_e2m1x2");
  expect(refusal([](AttentionConfig& c) { c.out = DType::kFloat4E2M1x2, c.head_dim_v = 24; }), "head_dim_v is 24",
         "multiples of 16");
  const std::string rope = refusal([](AttentionConfig& c) { c.features = Feature::kRopeLlama; });
  if (std::string(GetParam()->name).starts_with("generic")) {
    EXPECT_EQ(rope, "");
  } else {
    expect(rope, "kRopeLlama", "the generic kernels");
  }
  expect(refusal([](AttentionConfig& c) { c.kv_format = KvFormat::kCpuPacked; }), "float32", "16-bit, fp8 or int8");
  EXPECT_EQ(refusal([](AttentionConfig& c) { c.kv = DType::kInt8; }), "");
  expect(refusal([](AttentionConfig& c) { c.ragged_kv = DType::kInt8; }), "ragged_kv is int8", "fp8_e5m2");
  expect(refusal([](AttentionConfig& c) { c.q = DType::kInt8; }), "q is int8", "fp8_e5m2");
}

#if defined(__aarch64__)
TEST(KernelsOfAArch64, Bf16_WhereTheCpuHasBfmmla_IsPreferredToTheBaseline) {
  const std::span<const AttentionKernel* const> all = cpu_attention_kernels();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_STREQ(all[0]->name, "generic-bf16");
  EXPECT_STREQ(all[1]->name, "generic");
  platform::CpuFeatures features;
  EXPECT_NE(all[0]->unavailable(features).find("FEAT_BF16"), std::string::npos);
  EXPECT_EQ(all[1]->unavailable(features), "");
  features.bf16 = true;
  EXPECT_EQ(all[0]->unavailable(features), "");
}
#endif

}  // namespace
}  // namespace folio::inline v0::kernels
