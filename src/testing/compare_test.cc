#include "testing/compare.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "folio/types/float_convert.hpp"
#include "folio/types/nvfp4.hpp"
#include "kernels/cpu/generic/combine/row_convert.hpp"

namespace folio::verify {
namespace {

using ::testing::HasSubstr;

/// A small problem, its two references and the output that an exact kernel would store.
struct Example {
  Problem problem;
  AttentionResult<float> plain;
  AttentionResult<double> oracle;
  RunOutput output;

  explicit Example(const char* text) : problem(make_problem(parse_case(text))) {
    plain = plain_attention(problem);
    oracle = plain_attention_double(problem);
    const DType dtype = problem.config.out;
    output.out.resize(oracle.out.size() * static_cast<size_t>(size_of(dtype)));
    for (size_t i = 0; i < oracle.out.size(); ++i) set(i, oracle.out[i]);
    for (const double lse : oracle.lse) output.lse.push_back(static_cast<float>(lse));
  }
  void set(size_t index, double value) {
    if (problem.config.out == DType::kFloat4E2M1x2) return set_nvfp4();
    const double stored = value / double{problem.out_scale.at(0, 0)};
    store_from_float(output.out.data(), problem.config.out, static_cast<int64_t>(index), static_cast<float>(stored));
  }
  /// The whole output at once: values share scales.
  void set_nvfp4() {
    const std::vector<float> exact(oracle.out.begin(), oracle.out.end());
    output.block_scales.resize(exact.size() / kNvfp4BlockSize);
    for (size_t block = 0; block < output.block_scales.size(); ++block) {
      std::array<uint8_t, 512> scales{};
      kernels::generic::store_nvfp4(&exact[block * kNvfp4BlockSize], problem.out_scale.at(0, 0), kNvfp4BlockSize,
                                    &output.out[block * kNvfp4BlockSize / 2], {scales.data(), 0, 0, 1});
      output.block_scales[block] = scales[0];
    }
  }
  Tolerance tolerance() const { return Tolerance(problem, oracle, plain); }
  std::string compare() {
    CaseReport report;
    return compare_output(problem, oracle, tolerance(), output, LseBase::kE, report);
  }
};

TEST(Compare, AnExactResultPassesInEveryOutputType) {
  for (const char* dtypes : {"f32/f32/f32", "bf16/bf16/bf16", "f16/f16/f16", "e4m3/e4m3/e4m3", "f32/bf16/e5m2"}) {
    Example example((std::string("queries=mixed scales=host dtypes=") + dtypes).c_str());
    CaseReport report;
    EXPECT_EQ(compare_output(example.problem, example.oracle, example.tolerance(), example.output, LseBase::kE, report),
              "");
    EXPECT_EQ(report.values, static_cast<int64_t>(example.oracle.out.size() + example.oracle.lse.size()));
    EXPECT_LT(report.worst_share, 0.5) << dtypes;
  }
}

TEST(Compare, AnNvfp4OutputIsItsCodesAndItsScales) {
  Example example("dtypes=e4m3/e4m3/nvfp4 lengths=medium queries=mixed scales=host");
  EXPECT_EQ(example.compare(), "");
  example.output.out[5] ^= 0x01;
  EXPECT_THAT(example.compare(), HasSubstr("out: 1 of"));
  example.output.out[5] ^= 0x01;
  example.output.block_scales[2] ^= 0x01;
  EXPECT_NE(example.compare(), "");
}

TEST(Compare, TheLimitIsTheTolerance) {
  Example example("dtypes=f32/f32/f32 lengths=medium queries=mixed");
  const size_t dim = static_cast<size_t>(example.problem.config.head_dim_v);
  const double allowed = example.tolerance().out[1];
  example.set(dim + 3, example.oracle.out[dim + 3] + 0.9 * allowed);
  EXPECT_EQ(example.compare(), "");
  example.set(dim + 3, example.oracle.out[dim + 3] - 1.2 * allowed);
  EXPECT_THAT(example.compare(), HasSubstr("out: 1 of"));
  EXPECT_THAT(example.compare(), HasSubstr("head 1, component 3"));
}

TEST(Compare, RoundedWeightsMoveAnOutputByTheirRounding) {
  Example example("dtypes=f32/f32/f32 lengths=medium queries=mixed");
  const Tolerance rounded(example.problem, example.oracle, example.plain, DType::kBFloat16);
  const Tolerance exact = example.tolerance();
  for (size_t row = 0; row < exact.out.size(); ++row) {
    EXPECT_NEAR(rounded.out[row] - exact.out[row], double{example.plain.weight[row]} / 256.0, 1e-12);
  }
  EXPECT_EQ(rounded.lse, exact.lse);
}

TEST(Compare, ProductsOfFp8MoveLogitsAndSums) {
  Example example("dtypes=f32/f32/f32 lengths=medium queries=mixed");
  const Tolerance cut(example.problem, example.oracle, example.plain, DType::kFloat8E4M3);
  const Tolerance exact = example.tolerance();
  const double step = 34.0 / 8192.0;
  const double logit = step * double{example.plain.largest_steps};
  ASSERT_GT(logit, 0.0);
  EXPECT_NEAR(cut.lse - exact.lse, logit, 1e-12);
  const double subnormal = example.plain.most_keys * double{example.plain.largest_value} / 32768.0;
  for (size_t row = 0; row < exact.out.size(); ++row) {
    const double relative = 1.0 / 16.0 + 4.0 * step + std::expm1(2.0 * logit);
    EXPECT_NEAR(cut.out[row] - exact.out[row], relative * double{example.plain.weight[row]} + subnormal, 1e-9);
  }
}

TEST(Compare, NarrowOutputsAllowOneRoundingNotTwo) {
  Example example("dtypes=bf16/bf16/bf16 lengths=medium queries=mixed");
  uint16_t code = 0;
  std::memcpy(&code, example.output.out.data(), 2);
  code = static_cast<uint16_t>(code + 2);
  std::memcpy(example.output.out.data(), &code, 2);
  EXPECT_THAT(example.compare(), HasSubstr("component 0"));
}

TEST(Compare, KindsAreComparedFirst) {
  Example example("lengths=medium");
  example.output.lse[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(example.compare(), HasSubstr("lse: 1 of"));
  Example empty("lengths=empty seed=2 queries=mixed");
  size_t row = 0;
  while (std::isfinite(empty.oracle.lse[row])) ++row;
  EXPECT_EQ(empty.compare(), "");
  empty.output.lse[row] = -1e30f;
  EXPECT_THAT(empty.compare(), HasSubstr("lse: 1 of"));
  empty.output.lse[row] = -std::numeric_limits<float>::infinity();
  empty.set(row * static_cast<size_t>(empty.problem.config.head_dim_v), 1e-30);
  EXPECT_THAT(empty.compare(), HasSubstr("out: 1 of"));
}

TEST(Compare, TheReferencesCheckEachOther) {
  Example example("lengths=medium queries=mixed");
  EXPECT_EQ(compare_references(example.problem, example.oracle, example.plain), "");
  AttentionResult<double> wrong = example.oracle;
  wrong.lse[2] += 0.01;
  EXPECT_THAT(compare_references(example.problem, wrong, example.plain), HasSubstr("differ by"));
  wrong = example.oracle;
  wrong.lse[2] = -std::numeric_limits<double>::infinity();
  EXPECT_THAT(compare_references(example.problem, wrong, example.plain), HasSubstr("differ in kind"));
  wrong = example.oracle;
  wrong.out.pop_back();
  wrong.lse.pop_back();
  EXPECT_THAT(compare_references(example.problem, wrong, example.plain), HasSubstr("rows"));
}

}  // namespace
}  // namespace folio::verify
