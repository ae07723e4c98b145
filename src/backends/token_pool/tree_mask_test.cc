#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using Ints = std::vector<int32_t>;
using Bytes = std::vector<uint8_t>;

std::vector<GoldenCase> cases(const char* array) {
  return golden_cases("token_pool/tree_mask", array);
}

constexpr const char* kForms[] = {"full_mask", "qlen_only", "qlen_only_bitpacking", "full_bits", "tail_bits"};

class TreeMaskGolden : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(TreeMaskGolden, IsWrittenInEveryForm) {
  const GoldenCase& c = GetParam();
  const Ints parents = c.ints("parents"), seq_lens = c.ints("seq_lens");
  const auto nodes = c.at<int32_t>("draft_token_num");
  for (int32_t form = 0; form < 5; ++form) {
    SCOPED_TRACE(kForms[form]);
    const auto bytes = tree_mask_bytes(static_cast<TreeMaskForm>(form), seq_lens, nodes);
    Bytes expected = c.at<Bytes>(kForms[form]);
    ASSERT_EQ(bytes, static_cast<int64_t>(expected.size()));
    // Whatever was there before is overwritten, and nothing behind it.
    expected.resize(expected.size() + 3, 0xaa);
    Bytes mask(expected.size(), 0xaa);
    fill_tree_mask(static_cast<TreeMaskForm>(form), parents, seq_lens, nodes, mask);
    EXPECT_EQ(mask, expected);
  }
}
INSTANTIATE_TEST_SUITE_P(Data, TreeMaskGolden, ::testing::ValuesIn(cases("cases")), golden_case_name);

class TreeMaskWindows : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(TreeMaskWindows, FollowPaths) {
  const GoldenCase& c = GetParam();
  for (const TreeMaskForm form : {TreeMaskForm::kFullMask, TreeMaskForm::kFullBits}) {
    const Bytes expected = c.at<Bytes>(kForms[static_cast<int32_t>(form)]);
    Bytes mask(expected.size(), 0xaa);
    fill_tree_mask(form, c.ints("parents"), c.ints("seq_lens"), c.at<int32_t>("draft_token_num"), mask,
                   c.at<int32_t>("window_left"));
    EXPECT_EQ(mask, expected);
  }
}
INSTANTIATE_TEST_SUITE_P(Data, TreeMaskWindows, ::testing::ValuesIn(cases("windows")), golden_case_name);

class TreeMaskRefused : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(TreeMaskRefused, BeforeAnythingIsWritten) {
  const GoldenCase& c = GetParam();
  Bytes mask(c.value("size", size_t{99}), 0xaa);
  try {
    fill_tree_mask(static_cast<TreeMaskForm>(c.at<int32_t>("form")), c.ints("parents"), c.ints("seq_lens"),
                   c.at<int32_t>("draft_token_num"), mask, c.value("window_left", -1));
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), c.value("unsupported", false) ? ErrorCode::kUnsupported : ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr(c.at<std::string>("error")));
  }
  EXPECT_THAT(mask, ::testing::Each(0xaa));
}
INSTANTIATE_TEST_SUITE_P(Data, TreeMaskRefused, ::testing::ValuesIn(cases("refused")), golden_case_name);

bool bit(const Bytes& bytes, size_t index) {
  return (bytes[index / 8] >> index % 8 & 1) != 0;
}

TEST(TreeMaskTest, RandomTreesSeeTheirAncestors) {
  std::mt19937 random(6);
  const auto draw = [&random](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  for (int32_t round = 0; round < 60; ++round) {
    const int32_t nodes = draw(1, 32), batch = draw(0, 4);
    const auto n = static_cast<size_t>(nodes);
    Ints parents, seq_lens;
    for (int32_t r = 0; r < batch; ++r) {
      seq_lens.push_back(draw(0, 70));
      for (int32_t i = 0; i < nodes; ++i) parents.push_back(i == 0 ? -1 : draw(0, i - 1));
    }
    Bytes masks[5];
    for (int32_t form = 0; form < 5; ++form) {
      masks[form].resize(static_cast<size_t>(tree_mask_bytes(static_cast<TreeMaskForm>(form), seq_lens, nodes)), 0xaa);
      fill_tree_mask(static_cast<TreeMaskForm>(form), parents, seq_lens, nodes, masks[form]);
    }
    const size_t word_bits = nodes <= 8 ? 8 : nodes <= 16 ? 16 : 32;
    size_t full_row = 0, full_block = 0, tail_block = 0;
    for (size_t r = 0; r < static_cast<size_t>(batch); ++r) {
      const auto cached = static_cast<size_t>(seq_lens[r]);
      const size_t columns = cached + n;
      for (size_t i = 0; i < n; ++i, full_row += columns) {
        for (size_t column = 0; column < columns; ++column) {
          bool visible = column < cached;
          for (auto a = static_cast<int32_t>(i); a >= 0; a = parents[r * n + static_cast<size_t>(a)]) {
            visible = visible || column == cached + static_cast<size_t>(a);
          }
          EXPECT_EQ(masks[0][full_row + column], visible);
          EXPECT_EQ(bit(masks[3], full_block * 8 + i * columns + column), visible);
          if (column < cached) continue;
          const size_t c = column - cached;
          EXPECT_EQ(masks[1][(r * n + i) * n + c], visible);
          EXPECT_EQ(bit(masks[2], (r * n + i) * word_bits + c), visible);
          EXPECT_EQ(bit(masks[4], tail_block * 8 + i * n + c), visible);
        }
      }
      full_block += (n * columns + 7) / 8;
      tail_block += (n * n + 7) / 8;
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
