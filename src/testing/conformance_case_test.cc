#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "folio/types/error.hpp"
#include "folio/verify.hpp"

namespace folio::verify {
namespace {

using ::testing::HasSubstr;

std::string refusal_of(std::string_view text) {
  try {
    static_cast<void>(parse_case(text));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

TEST(ConformanceCaseText, EveryLevelSurvivesTheRoundTrip) {
  for (size_t i = 0; i < kNumFactors; ++i) {
    for (size_t l = 0; l < factors()[i].levels.size(); ++l) {
      ConformanceCase one;
      one.kernel = "generic";
      one.seed = ~uint64_t{0} - l;
      one.levels[i] = static_cast<uint8_t>(l);
      EXPECT_EQ(parse_case(to_string(one)), one) << to_string(one);
    }
  }
}

TEST(ConformanceCaseText, LeavesOutWhatIsPlain) {
  EXPECT_EQ(to_string(ConformanceCase{}), "seed=1");
  EXPECT_EQ(parse_case("  page=1\tseed=9\n"), parse_case("seed=9 page=1"));
}

TEST(ConformanceCaseText, ACaseOfFp8ProductsKeepsWhatDoesNotHinderThem) {
  const ConformanceCase changed =
      with_fp8_mma(parse_case("seed=4 dtypes=f16/f16/f16 dims=64/64 mask=custom-tail cap=on alibi=on rope=on page=8"));
  EXPECT_EQ(to_string(changed), "seed=4 dtypes=e4m3/e4m3/bf16 dims=128/128 page=8 fp8-products=allowed");
  const ConformanceCase kept =
      parse_case("seed=4 dtypes=e4m3/e4m3/e4m3 dims=128/128 mask=none window=both fp8-products=allowed");
  EXPECT_EQ(with_fp8_mma(kept), kept);
}

TEST(ConformanceCaseText, RefusesWithWhatIsOffered) {
  EXPECT_THAT(refusal_of("colour=red"), HasSubstr("kernel, seed, dtypes"));
  EXPECT_THAT(refusal_of("page=17"), HasSubstr("16, 1, 8, 32, 64"));
  EXPECT_THAT(refusal_of("seed=minus"), HasSubstr("must be a number"));
  EXPECT_THAT(refusal_of("seed="), HasSubstr("must be a number"));
  EXPECT_THAT(refusal_of("page"), HasSubstr("factor=level"));
}

TEST(ConformanceCaseText, SaysWhichLevelsDoNotGoTogether) {
  EXPECT_EQ(invalid_reason(parse_case("format=packed page=32")), "");
  EXPECT_THAT(invalid_reason(parse_case("format=packed page=8")), HasSubstr("16 tokens or more"));
  EXPECT_THAT(invalid_reason(parse_case("format=packed dtypes=f32/f32/f32")), HasSubstr("packed"));
  ConformanceCase beyond;
  beyond.levels[3] = 99;
  EXPECT_THAT(invalid_reason(beyond), HasSubstr("page has no level 99"));
  EXPECT_THROW(static_cast<void>(run_case(beyond)), Error);
}

}  // namespace
}  // namespace folio::verify
