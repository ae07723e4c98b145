#include "folio/backends/token_pool/draft_tree.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "backends/token_pool/refusal_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::refusal;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

std::vector<GoldenCase> tree_cases(const char* array) {
  return golden_cases("token_pool/draft_tree", array);
}

DraftTreeShape shape_of(const GoldenCase& c) {
  return {c.at<int32_t>("topk"), c.at<int32_t>("spec_steps"), c.at<int32_t>("draft_token_num")};
}

/// Scores; null stands for a NaN, which JSON does not have.
std::vector<float> scores_of(const GoldenCase& c) {
  std::vector<float> scores;
  for (const auto& score : c.data.at("scores")) {
    scores.push_back(score.is_null() ? std::numeric_limits<float>::quiet_NaN() : score.get<float>());
  }
  return scores;
}

class DraftTreeGolden : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(DraftTreeGolden, SelectsTheBestCandidates) {
  const GoldenCase& c = GetParam();
  const Longs expected = c.at<Longs>("selected_index"), expected_tokens = c.at<Longs>("draft_tokens");
  Longs selected(expected.size(), -7), tokens(expected_tokens.size(), -7);
  select_draft_tokens(scores_of(c), c.at<Longs>("tokens"), c.at<Longs>("bonus_tokens"), shape_of(c), selected, tokens);
  EXPECT_EQ(selected, expected);
  EXPECT_EQ(tokens, expected_tokens);
}

TEST_P(DraftTreeGolden, FindsParents) {
  const GoldenCase& c = GetParam();
  const Ints expected = c.ints("parents");
  Ints parents(expected.size(), -7);
  draft_tree_parents(c.at<Longs>("parent_list"), c.at<Longs>("selected_index"), shape_of(c), parents);
  EXPECT_EQ(parents, expected);
}

TEST_P(DraftTreeGolden, PlacesAndLinksNodes) {
  const GoldenCase& c = GetParam();
  const Ints parents = c.ints("parents");
  Ints positions(parents.size(), -7), index = positions, next_token = positions, next_sibling = positions;
  draft_tree_positions(parents, c.ints("seq_lens"), positions);
  EXPECT_EQ(positions, c.ints("positions"));
  draft_tree_links(parents, c.at<int32_t>("draft_token_num"), index, next_token, next_sibling);
  EXPECT_EQ(index, c.ints("retrieve_index"));
  EXPECT_EQ(next_token, c.ints("next_token"));
  EXPECT_EQ(next_sibling, c.ints("next_sibling"));
}
INSTANTIATE_TEST_SUITE_P(Data, DraftTreeGolden, ::testing::ValuesIn(tree_cases("cases")), golden_case_name);

TEST(DraftTreeRefused, SelectionsBeforeAnythingIsWritten) {
  for (const GoldenCase& c : tree_cases("refused_selections")) {
    SCOPED_TRACE(c.data.dump());
    Longs selected(static_cast<size_t>(c.at<int32_t>("draft_token_num") - 1), -7), tokens(selected.size() + 1, -7);
    EXPECT_THAT(refusal([&] {
                  select_draft_tokens(scores_of(c), c.at<Longs>("tokens"), c.at<Longs>("bonus_tokens"), shape_of(c),
                                      selected, tokens);
                }),
                HasSubstr(c.at<std::string>("error")));
    EXPECT_THAT(selected, Each(-7));
    EXPECT_THAT(tokens, Each(-7));
  }
}

TEST(DraftTreeRefused, ParentsBeforeAnythingIsWritten) {
  for (const GoldenCase& c : tree_cases("refused_parents")) {
    SCOPED_TRACE(c.data.dump());
    const Longs list = c.at<Longs>("parent_list"), selected = c.at<Longs>("selected_index");
    const DraftTreeShape shape = shape_of(c);
    Ints parents(std::max<size_t>(1, selected.size() / 2) * static_cast<size_t>(shape.draft_token_num), -7);
    EXPECT_THAT(refusal([&] { draft_tree_parents(list, selected, shape, parents); }),
                HasSubstr(c.at<std::string>("error")));
    EXPECT_THAT(parents, Each(-7));
  }
}

TEST(DraftTreeRefused, WhatIsNoTree) {
  for (const GoldenCase& c : tree_cases("refused_trees")) {
    SCOPED_TRACE(c.data.dump());
    const Ints parents = c.ints("parents");
    Ints a(parents.size(), -7), b = a, d = a;
    EXPECT_THAT(refusal([&] { draft_tree_positions(parents, c.ints("seq_lens"), a); }),
                HasSubstr(c.at<std::string>("error")));
    EXPECT_THAT(a, Each(-7));
    EXPECT_THAT(refusal([&] { draft_tree_links(parents, c.at<int32_t>("draft_token_num"), a, b, d); }),
                HasSubstr(c.at<std::string>("error")));
    EXPECT_THAT(b, Each(-7));
  }
}

TEST(DraftTreeRefused, PositionsAndSizes) {
  for (const GoldenCase& c : tree_cases("refused_positions")) {
    SCOPED_TRACE(c.data.dump());
    const Ints parents = c.ints("parents");
    Ints positions(parents.size(), -7);
    EXPECT_THAT(refusal([&] { draft_tree_positions(parents, c.ints("seq_lens"), positions); }),
                HasSubstr(c.at<std::string>("error")));
    EXPECT_THAT(positions, Each(-7));
  }
  const Ints parents = {-1, 0}, seq_lens = {1};
  Ints one(1), two(2);
  EXPECT_THAT(refusal([&] { draft_tree_positions(parents, seq_lens, one); }), HasSubstr("positions has 1"));
  EXPECT_THAT(refusal([&] { draft_tree_links(parents, 2, one, two, two); }), HasSubstr("retrieve_index has 1"));
  EXPECT_THAT(refusal([&] { draft_tree_links(parents, 2, two, one, two); }), HasSubstr("next_token has 1"));
  EXPECT_THAT(refusal([&] { draft_tree_links(parents, 2, two, two, one); }), HasSubstr("next_sibling has 1"));
  EXPECT_THAT(refusal([&] { draft_tree_links(parents, 0, two, two, two); }), HasSubstr("draft_token_num is 0"));
  EXPECT_THAT(refusal([&] { draft_tree_links(parents, 3, two, two, two); }), HasSubstr("requests have 3 each"));
}

/// A draft as an engine makes it: every step extends the topk best of the step before.
struct RandomDraft {
  std::vector<float> scores;
  Longs parent_list;
};

RandomDraft random_draft(std::mt19937& random, const DraftTreeShape& shape) {
  std::uniform_real_distribution<float> factor(0.0f, 1.0f);
  RandomDraft draft;
  for (int32_t k = 0; k < shape.topk; ++k) draft.scores.push_back(factor(random));
  if (shape.spec_steps > 1) draft.parent_list.push_back(-1);
  Longs last;
  for (int64_t k = 0; k < shape.topk; ++k) last.push_back(k);
  for (int32_t step = 1; step < shape.spec_steps; ++step) {
    std::stable_sort(last.begin(), last.end(), [&](int64_t a, int64_t b) {
      return draft.scores[static_cast<size_t>(a)] > draft.scores[static_cast<size_t>(b)];
    });
    last.resize(static_cast<size_t>(shape.topk));
    Longs next;
    for (int64_t parent : last) {
      draft.parent_list.push_back(parent);
      for (int32_t k = 0; k < shape.topk; ++k) {
        next.push_back(static_cast<int64_t>(draft.scores.size()));
        draft.scores.push_back(draft.scores[static_cast<size_t>(parent)] * factor(random));
      }
    }
    last = next;
  }
  return draft;
}

TEST(DraftTreeTest, RandomDraftsAreWhatTheirPathsSay) {
  std::mt19937 random(3);
  for (int32_t round = 0; round < 300; ++round) {
    const auto draw = [&random](int32_t low, int32_t high) {
      return std::uniform_int_distribution<int32_t>(low, high)(random);
    };
    DraftTreeShape shape{draw(1, 5), draw(1, 5), 1};
    shape.draft_token_num = draw(1, static_cast<int32_t>(std::min<int64_t>(20, draft_candidates(shape) + 1)));
    const RandomDraft draft = random_draft(random, shape);
    const auto nodes = static_cast<size_t>(shape.draft_token_num);
    Longs tokens(draft.scores.size()), selected(nodes - 1), draft_tokens(nodes);
    for (int64_t& token : tokens) token = draw(0, 1 << 20);
    select_draft_tokens(draft.scores, tokens, Longs{42}, shape, selected, draft_tokens);

    // Naively: all candidates sorted.
    Longs order(draft.scores.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return draft.scores[static_cast<size_t>(a)] > draft.scores[static_cast<size_t>(b)];
    });
    std::sort(order.begin(), order.begin() + static_cast<int64_t>(nodes) - 1);
    order.resize(nodes - 1);
    EXPECT_EQ(selected, order);
    EXPECT_EQ(draft_tokens[0], 42);

    Ints parents(nodes), positions(nodes);
    draft_tree_parents(draft.parent_list, selected, shape, parents);
    const Ints seq_lens = {draw(0, 1000)};
    draft_tree_positions(parents, seq_lens, positions);
    for (size_t i = 1; i < nodes; ++i) {
      EXPECT_EQ(draft_tokens[i], tokens[static_cast<size_t>(selected[i - 1])]);
      // The step of a candidate is its depth.
      const int64_t c = selected[i - 1], topk = shape.topk;
      const int64_t depth = c < topk ? 1 : 2 + (c - topk) / (topk * topk);
      EXPECT_EQ(positions[i], seq_lens[0] + depth);
      const int64_t parent = c < topk ? -1 : draft.parent_list[static_cast<size_t>(c / topk)];
      EXPECT_EQ(parents[i] == 0 ? -1 : selected[static_cast<size_t>(parents[i]) - 1], parent);
    }
  }
}

TEST(DraftTreeTest, LinksListEveryChildInOrder) {
  std::mt19937 random(4);
  for (int32_t round = 0; round < 100; ++round) {
    const int32_t nodes = 1 + round % 12;
    Ints parents;
    for (int32_t i = 0; i < 3 * nodes; ++i) {
      const int32_t node = i % nodes;
      parents.push_back(node == 0 ? -1 : std::uniform_int_distribution<int32_t>(0, node - 1)(random));
    }
    Ints index(parents.size()), next_token = index, next_sibling = index;
    draft_tree_links(parents, nodes, index, next_token, next_sibling);
    for (int32_t r = 0; r < 3; ++r) {
      for (int32_t node = 0; node < nodes; ++node) {
        const auto at = static_cast<size_t>(r * nodes + node);
        EXPECT_EQ(index[at], r * nodes + node);
        Ints children, expected;
        for (int32_t child = next_token[at]; child >= 0; child = next_sibling[static_cast<size_t>(r * nodes + child)]) {
          children.push_back(child);
        }
        for (int32_t other = 0; other < nodes; ++other) {
          if (parents[static_cast<size_t>(r * nodes + other)] == node) expected.push_back(other);
        }
        EXPECT_EQ(children, expected);
      }
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
