#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "core/instrumented_test_util.hpp"
#include "folio/types/error.hpp"
#include "folio/verify.hpp"

namespace folio::verify {
namespace {

/// One that takes every level.
std::vector<std::string> one_kernel() {
  return {"generic"};
}

TEST(CoveringArray, CoversEveryValidPairCountedAnew) {
  const CoveringArray array = covering_array(one_kernel(), 2);
  std::set<std::tuple<size_t, int, size_t, int>> covered;
  for (const ConformanceCase& c : array.cases) {
    EXPECT_EQ(invalid_reason(c), "") << to_string(c);
    for (size_t i = 0; i < kNumFactors; ++i) {
      for (size_t j = i + 1; j < kNumFactors; ++j) covered.insert({i, c.levels[i], j, c.levels[j]});
    }
  }
  int64_t valid = 0;
  for (size_t i = 0; i < kNumFactors; ++i) {
    for (size_t j = i + 1; j < kNumFactors; ++j) {
      for (size_t a = 0; a < factors()[i].levels.size(); ++a) {
        for (size_t b = 0; b < factors()[j].levels.size(); ++b) {
          ConformanceCase plain;  // level 0 goes with everything, so a pair is valid where it is beside plain levels
          plain.levels[i] = static_cast<uint8_t>(a);
          plain.levels[j] = static_cast<uint8_t>(b);
          if (!invalid_reason(plain).empty()) continue;
          ++valid;
          EXPECT_TRUE(covered.count({i, static_cast<int>(a), j, static_cast<int>(b)}) != 0) << to_string(plain);
        }
      }
    }
  }
  // The kernel is a column too: one level, with every level of every factor.
  int64_t with_kernel = 0;
  for (const FactorInfo& factor : factors()) with_kernel += static_cast<int64_t>(factor.levels.size());
  EXPECT_EQ(array.coverage.valid, valid + with_kernel);
  EXPECT_EQ(array.coverage.covered, array.coverage.valid);
  EXPECT_GT(array.coverage.tuples, array.coverage.valid);
}

TEST(CoveringArray, StrengthOneNeedsAsManyCasesAsTheLongestFactorHasLevels) {
  size_t most = 0;
  for (const FactorInfo& factor : factors()) most = std::max(most, factor.levels.size());
  const CoveringArray array = covering_array(one_kernel(), 1);
  EXPECT_EQ(array.coverage.covered, array.coverage.valid);
  EXPECT_GE(array.cases.size(), most);
  EXPECT_LE(array.cases.size(), most + 3);
}

TEST(CoveringArray, IsTheSameForTheSameSeed) {
  constexpr int kStrength = folio::testing::kInstrumented ? 1 : 2;
  const std::vector<ConformanceCase> cases = covering_array(one_kernel(), kStrength, 5).cases;
  EXPECT_EQ(cases, covering_array(one_kernel(), kStrength, 5).cases);
  EXPECT_NE(cases, covering_array(one_kernel(), kStrength, 6).cases);
}

TEST(CoveringArray, RefusesStrengthsAndKernelsThatItDoesNotHave) {
  EXPECT_THROW(static_cast<void>(covering_array(one_kernel(), 4)), Error);
  EXPECT_THROW(static_cast<void>(covering_array({}, 2)), Error);
  const std::vector<std::string> unknown{"no-such-kernel"};
  EXPECT_THROW(static_cast<void>(covering_array(unknown, 2)), Error);
}

TEST(RandomCases, AreValidRepeatableAndDifferent) {
  const std::vector<ConformanceCase> cases = random_cases(one_kernel(), 50, 3);
  EXPECT_EQ(cases, random_cases(one_kernel(), 50, 3));
  for (const ConformanceCase& c : cases) EXPECT_EQ(invalid_reason(c), "") << to_string(c);
  EXPECT_NE(cases[0], cases[1]);
}

}  // namespace
}  // namespace folio::verify
