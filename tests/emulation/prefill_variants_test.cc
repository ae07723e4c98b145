// "cuda-sm90-prefill" has an instantiation for each dtype of K and V, pair of head dimensions and variant of logits.
// One conformance case for every pair of these that differ in code, on the emulated GPU: the few random cases that an
// emulation has time for miss some.
#include <gtest/gtest.h>

#include <string>

#include "folio/attention.hpp"
#include "folio/verify.hpp"

namespace folio::verify {
namespace {

struct Kind {
  const char* name;
  const char* levels;
  bool with_all = false;  ///< tested with all others; else only with those that are
};

constexpr Kind kLogits[] = {{"plain", "", true},
                            {"cap", " cap=on"},
                            {"alibi", " alibi=on"},
                            {"custom", " mask=custom-all", true},
                            {"all", " mask=custom-tail cap=on alibi=on"}};

/// Pages that TMA loads and, of fp8 data, others: these take a path of their own to shared memory.
constexpr Kind kInputs[] = {{"bfloat16", "", true},
                            {"e4m3", " dtypes=bf16/e4m3/bf16", true},
                            {"float16", " dtypes=f16/f16/f16"},
                            {"e4m3_queries", " dtypes=e4m3/e4m3/bf16 page=8"},
                            {"e4m3_tokens", " dtypes=bf16/e4m3/bf16 page=1"},
                            {"e5m2", " dtypes=f16/e5m2/f16 page=32"}};
constexpr Kind kDims[] = {{"64", " dims=64/64"}, {"192_128", " dims=192/128"}, {"256", " dims=256/256"}};

void check_case(const std::string& text) {
  const CaseReport report = run_case(parse_case(text));
  EXPECT_TRUE(report.passed) << report.failure << "\n  case: " << text;
}

void check(const std::string& levels) {
  check_case("kernel=cuda-sm90-prefill seed=3 group=4 queries=prefill determinism=none" + levels);
}

class PrefillVariants : public ::testing::TestWithParam<Kind> {};

TEST_P(PrefillVariants, OfEveryTypeAt128) {
  for (const Kind& inputs : kInputs) {
    if (!inputs.with_all && !GetParam().with_all) continue;
    SCOPED_TRACE(inputs.name);
    check(std::string(" dims=128/128") + inputs.levels + GetParam().levels);
  }
}

TEST_P(PrefillVariants, OfOtherHeadDimensions) {
  for (const Kind& dims : kDims) {
    SCOPED_TRACE(dims.name);
    check(std::string(dims.levels) + GetParam().levels);
  }
}

/// KV tiles before rows, around them and behind them: ALiBi has a path for the first and one for the others.
TEST(PrefillAlibi, OfKeysOnBothSides) {
  for (const char* levels : {"group=4 determinism=none", "group=4 determinism=none window=both",
                             "group=1 determinism=none segments=prefix+new", "group=4 determinism=batch workers=5"}) {
    check_case(std::string("kernel=cuda-sm90-prefill seed=5 queries=prefill dims=128/128 mask=none alibi=on "
                           "lengths=medium ") +
               levels);
  }
}

/// Of custom masks, tiles that all rows see take no bits, and tiles at the ends that no row sees are left out.
TEST(PrefillCustomMask, OfTilesThatAllOrNoRowsSee) {
  for (const char* levels : {"group=4 determinism=none mask=custom-all", "group=1 determinism=none mask=custom-tail",
                             "group=4 determinism=batch workers=5 mask=custom-all segments=prefix+new",
                             "group=4 determinism=none mask=custom-all page=1 dtypes=bf16/e4m3/bf16"}) {
    check_case(std::string("kernel=cuda-sm90-prefill seed=7 queries=prefill dims=128/128 lengths=medium ") + levels);
  }
}

/// Behind a long prefix that TMA loads, new tokens that all producer warps copy: fetch warps come to these first.
TEST(PrefillSegments, OfCopiedTokensBehindALongPrefix) {
  for (const char* levels :
       {"dims=192/128 format=concatenated", "dims=128/128", "dims=256/256", "dims=64/64 page=32"}) {
    check_case(std::string("kernel=cuda-sm90-prefill seed=3 group=4 queries=prefill lengths=long segments=prefix+new "
                           "determinism=batch workers=1 ") +
               levels);
  }
}

/// FP8 MMA has a producer and consumers of its own.
TEST(PrefillFp8Mma, Conforms) {
  for (const char* levels :
       {"", " mask=none window=both", " page=8 dtypes=e4m3/e4m3/e4m3", " page=64 segments=prefix+new", " page=1",
        " segments=ragged", " lengths=medium scales=request+head"}) {
    check_case(to_string(with_fp8_mma(parse_case(std::string("seed=2 kernel=cuda-sm90-prefill group=4 queries=prefill "
                                                             "determinism=none") +
                                                 levels))));
  }
}

/// Where FP8 MMA is impossible, the permission changes nothing.
TEST(PrefillFp8Mma, IsAPermission) {
  AttentionConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_v = 128;
  config.q = config.kv = DType::kFloat8E4M3;
  PrepareOptions options;
  EXPECT_FALSE(prepare(Context::cuda(0), config, options).fp8_mma());
  options.allow_fp8_mma = true;
  const AttentionOp op = prepare(Context::cuda(0), config, options);
  EXPECT_TRUE(op.fp8_mma());
  EXPECT_EQ(op.p_dtype(), DType::kFloat8E4M3);
  config.features = Feature::kSoftCap;
  EXPECT_FALSE(prepare(Context::cuda(0), config, options).fp8_mma());
  check(" dims=128/128 dtypes=e4m3/e4m3/bf16 cap=on fp8-products=allowed");
  check(" dims=128/128 dtypes=bf16/e4m3/bf16 fp8-products=allowed");
}

INSTANTIATE_TEST_SUITE_P(Logits, PrefillVariants, ::testing::ValuesIn(kLogits),
                         [](const auto& kind) { return std::string(kind.param.name); });

}  // namespace
}  // namespace folio::verify
