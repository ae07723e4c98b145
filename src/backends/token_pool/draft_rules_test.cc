// What kernels of draft branches and trees do, a thread at a time, on the host: the bodies are the kernels' own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backends/token_pool/device/draft_indices_rule.hpp"
#include "backends/token_pool/device/tree_mask_rule.hpp"
#include "backends/token_pool/list_report.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::backends::token_pool {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;

constexpr int32_t kSentinel = -77;

/// The first fault, as a kernel keeps it.
struct Found {
  void operator()(const ListReport& report) {
    if (first.fault == KvRangeFault::kNone) first = report;
  }
  ListReport first;
};

/// Rows 1 to 3 of a table of 40 columns, slot 100 * row + position, two branches of three steps; room for the steps'
/// lists and some more.
struct Branches {
  Branches() {
    for (int32_t row = 0; row < 4; ++row) {
      for (int32_t p = 0; p < 40; ++p) table.push_back(100 * row + p);
    }
  }

  DraftIndicesJob job() {
    DraftIndicesJob job;
    job.table = {table.data(), 40, 40, static_cast<int64_t>(table.size()), 4};
    job.rows = rows.data();
    job.lens = lens.data();
    job.starts = starts.empty() ? nullptr : starts.data();
    job.num_requests = static_cast<int32_t>(rows.size());
    job.branches = branches;
    job.num_iterations = steps;
    job.num_slots = num_slots;
    job.indptr = indptr.data();
    job.indptr_stride = 8;
    job.indices = indices.data();
    job.indices_stride = stride;
    job.indices_size = steps * stride;
    return job;
  }

  /// The kernel's CTAs, the last first; three threads each.
  void run() {
    indptr.assign(static_cast<size_t>(steps) * 8, kSentinel);
    indices.assign(static_cast<size_t>(steps * stride + 9), kSentinel);
    found = {};
    const DraftIndicesJob all = job();
    for (int32_t step = steps; step >= 1; --step) {
      for (int32_t r = all.num_requests - 1; r >= 0; --r) {
        int64_t before = 0;
        for (int32_t other = 0; other < r; ++other) before += all.counted_len(other);
        for (int32_t k = branches.topk - 1; k >= 0; --k) {
          for (int32_t lane = 2; lane >= 0; --lane) write_draft_branch(all, before, r, k, step, lane, 3, found);
        }
      }
    }
  }

  Ints entries(int32_t step, int32_t branch) const {
    const int32_t* const offsets = indptr.data() + (step - 1) * 8;
    const int32_t* const row = indices.data() + (step - 1) * stride;
    return {row + offsets[branch], row + offsets[branch + 1]};
  }

  Ints table, rows{1, 2, 3}, lens{5, 9, 2}, starts;
  DraftBranches branches{2, 3, 4};
  int32_t steps = 3;
  int64_t num_slots = 400;
  int64_t stride = 60;
  Ints indptr, indices;
  Found found;
};

TEST(DraftBranchesRule, EqualsTheHostsLists) {
  for (const int32_t page_size : {1, 4}) {
    for (const bool windows : {false, true}) {
      Branches draft;
      draft.branches.page_size = page_size;
      if (windows) draft.starts = {3, 0, 7};
      draft.run();
      EXPECT_EQ(draft.found.first.fault, KvRangeFault::kNone);
      Ints indptr(draft.indptr.size(), kSentinel), indices(draft.indices.size(), kSentinel);
      generate_draft_decode_kv_indices(
          {dense_table(draft.table, 4, 40), draft.rows, draft.lens, draft.starts, draft.branches, draft.steps, 400},
          {indptr, 8, indices, draft.stride});
      EXPECT_EQ(draft.indptr, indptr);
      EXPECT_EQ(draft.indices, indices);
    }
  }
}

/// Its entries are the dummy slot, as many as lists count with; the other requests keep theirs.
TEST(DraftBranchesRule, RequestsThatCannotBeListed_ReadNothingOfOthers) {
  struct Case {
    const char* name;
    KvRangeFault fault;
    int32_t row, len, start;
    size_t counted;
  };
  const Case cases[] = {
      {"a row that is not there", KvRangeFault::kRow, 4, 9, 0, 9},
      {"a negative row", KvRangeFault::kRow, -1, 9, 0, 9},
      {"a negative length", KvRangeFault::kLength, 2, -3, 0, 0},
      {"a length that no row has", KvRangeFault::kEnd, 2, 41, 0, 0},
      {"the largest length", KvRangeFault::kEnd, 2, std::numeric_limits<int32_t>::max(), 0, 0},
      {"branches beyond the row", KvRangeFault::kEnd, 2, 30, 0, 30},
      {"a negative start", KvRangeFault::kStart, 2, 9, -1, 9},
      {"a start beyond the row", KvRangeFault::kEnd, 2, 9, std::numeric_limits<int32_t>::max(), 9},
  };
  Branches right;
  right.run();
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    Branches draft;
    draft.stride = 120;
    draft.rows[1] = c.row;
    draft.lens[1] = c.len;
    draft.starts = {0, c.start, 0};
    draft.run();
    EXPECT_EQ(draft.found.first.fault, c.fault);
    EXPECT_EQ(draft.found.first.request, 1);
    for (int32_t step = 1; step <= 3; ++step) {
      for (const int32_t branch : {0, 1, 4, 5}) EXPECT_EQ(draft.entries(step, branch), right.entries(step, branch));
      for (const int32_t branch : {2, 3}) {
        EXPECT_EQ(draft.entries(step, branch), Ints(c.counted + static_cast<size_t>(step), 0));
      }
    }
  }
}

TEST(DraftBranchesRule, SlotsOutsideThePool_AreTheDummySlot) {
  Branches draft;
  draft.table[40 + 2] = 400;
  draft.run();
  EXPECT_EQ(draft.found.first.fault, KvRangeFault::kSlot);
  EXPECT_THAT(describe(draft.found.first), HasSubstr("request 0 has slot 400"));
  EXPECT_EQ(draft.entries(1, 0), (Ints{100, 101, 0, 103, 104, 105}));
}

/// Nothing is written behind the row of a step, and offsets end with it.
TEST(DraftBranchesRule, ListsThatDoNotFit_EndWithTheRow) {
  for (const int64_t stride : {0, 1, 11, 29, 37, 49}) {
    Branches draft, right;
    right.run();
    draft.stride = stride;
    draft.run();
    for (int32_t step = 1; step <= 3; ++step) {
      const int64_t needed = 2 * (16 + 3 * step);
      EXPECT_EQ(draft.indptr[static_cast<size_t>((step - 1) * 8 + 6)], std::min(stride, needed));
      for (int32_t branch = 0; branch < 6; ++branch) {
        const Ints entries = draft.entries(step, branch), expected = right.entries(step, branch);
        ASSERT_LE(entries.size(), expected.size());
        EXPECT_TRUE(std::equal(entries.begin(), entries.end(), expected.begin()));
      }
    }
    EXPECT_EQ(draft.found.first.fault, KvRangeFault::kCapacity) << stride;
    EXPECT_THAT(Ints(draft.indices.end() - 9, draft.indices.end()), Each(kSentinel));
  }
}

/// As the kernel: candidates in ascending order, those taken counted.
Longs select(const std::vector<float>& scores, int32_t count) {
  Longs selected(static_cast<size_t>(count)), tokens(scores.size()), drafts(static_cast<size_t>(count) + 1);
  std::iota(tokens.begin(), tokens.end(), 1000);
  const Longs bonus{7};
  DraftSelectionJob job{scores.data(), tokens.data(),   bonus.data(), 1, static_cast<int32_t>(scores.size()),
                        count + 1,     selected.data(), drafts.data()};
  write_selected(job, 0, 0, -1);
  int32_t node = 0;
  for (int32_t c = 0; c < job.num_candidates; ++c) {
    if (is_selected(scores.data(), job.num_candidates, count, c)) write_selected(job, 0, ++node, c);
  }
  EXPECT_EQ(node, count);
  EXPECT_EQ(drafts[0], 7);
  for (int32_t i = 0; i < count; ++i) {
    EXPECT_EQ(drafts[static_cast<size_t>(i) + 1], 1000 + selected[static_cast<size_t>(i)]);
  }
  return selected;
}

TEST(DraftSelectionRule, TakesWhatTheHostTakes) {
  std::mt19937 random(5);
  for (int32_t round = 0; round < 200; ++round) {
    const int32_t topk = 1 + round % 4, steps = 1 + round % 3;
    DraftTreeShape shape{topk, steps, 1};
    const auto candidates = static_cast<int32_t>(draft_candidates(shape));
    shape.draft_token_num = 1 + static_cast<int32_t>(random() % static_cast<uint32_t>(candidates + 1));
    std::vector<float> scores(static_cast<size_t>(candidates));
    for (float& score : scores) score = static_cast<float>(random() % 6) / 8.0f;  // many are equal
    if (round % 7 == 0) scores[0] = -std::numeric_limits<float>::infinity();
    Longs selected(static_cast<size_t>(shape.draft_token_num - 1)), drafts(selected.size() + 1);
    select_draft_tokens(scores, Longs(scores.size()), Longs{0}, shape, selected, drafts);
    EXPECT_EQ(select(scores, shape.draft_token_num - 1), selected);
  }
}

TEST(DraftSelectionRule, NansAreTheLowestScores) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), none = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(select({nan, .1f, nan, none, .3f}, 3), (Longs{1, 3, 4}));
  EXPECT_EQ(select({nan, .1f, nan, none, .3f}, 4), (Longs{0, 1, 3, 4}));
  EXPECT_EQ(select({nan, nan}, 1), (Longs{0}));
}

Ints parents_by_rule(const Longs& list, const Longs& selected, const DraftTreeShape& shape, Found& found) {
  Ints parents(selected.size() + 1, kSentinel);
  const DraftParentsJob job{list.data(),
                            static_cast<int64_t>(list.size()),
                            selected.data(),
                            draft_candidates(shape),
                            shape.topk,
                            1,
                            shape.draft_token_num,
                            parents.data()};
  for (int32_t node = shape.draft_token_num - 1; node >= 0; --node) write_parent(job, 0, node, found);
  return parents;
}

TEST(DraftParentsRule, FaultsHangOffTheRoot) {
  const DraftTreeShape shape{2, 3, 4};  // 10 candidates, 5 extensions
  const Longs list = {-1, 0, 1, 2, 4};
  struct Case {
    Longs selected;
    Ints parents;
    KvRangeFault fault;
  };
  const Case cases[] = {
      {{0, 2, 6}, {-1, 0, 1, 2}, KvRangeFault::kNone},
      {{0, 1, 6}, {-1, 0, 0, 0}, KvRangeFault::kLostParent},
      {{0, 2, 10}, {-1, 0, 1, 0}, KvRangeFault::kCandidate},
      {{-5, 2, 6}, {-1, 0, 0, 2}, KvRangeFault::kLostParent},
      {{0, 2, std::numeric_limits<int64_t>::max()}, {-1, 0, 1, 0}, KvRangeFault::kCandidate},
      {{0, std::numeric_limits<int64_t>::min(), 6}, {-1, 0, 0, 0}, KvRangeFault::kLostParent},
      {{0, 2, 2}, {-1, 0, 1, 0}, KvRangeFault::kOrder},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::PrintToString(c.selected));
    Found found;
    EXPECT_EQ(parents_by_rule(list, c.selected, shape, found), c.parents);
    EXPECT_EQ(found.first.fault, c.fault);
    Ints parents(4);
    if (c.fault == KvRangeFault::kNone) {
      draft_tree_parents(list, c.selected, shape, parents);
      EXPECT_EQ(parents, c.parents);
    } else {
      EXPECT_THROW(draft_tree_parents(list, c.selected, shape, parents), Error);
    }
  }
}

struct Nodes {
  explicit Nodes(const Ints& parents, const Ints& seq_lens) {
    const auto requests = static_cast<int32_t>(seq_lens.size());
    const auto nodes = static_cast<int32_t>(parents.size() / seq_lens.size());
    positions = index = next_token = next_sibling = Ints(parents.size(), kSentinel);
    const DraftNodesJob job{parents.data(),   seq_lens.data(), requests,          nodes,
                            positions.data(), index.data(),    next_token.data(), next_sibling.data()};
    for (int32_t r = requests - 1; r >= 0; --r) {
      for (int32_t node = 0; node < nodes; ++node) write_node(job, r, node, found);
    }
  }
  Ints positions, index, next_token, next_sibling;
  Found found;
};

TEST(DraftNodesRule, StandWhereTheHostSays) {
  std::mt19937 random(8);
  for (int32_t round = 0; round < 100; ++round) {
    const int32_t nodes = 1 + round % 20;
    Ints parents, seq_lens{static_cast<int32_t>(random() % 900), 0, 5};
    for (int32_t i = 0; i < 3 * nodes; ++i) {
      const int32_t node = i % nodes;
      parents.push_back(node == 0 ? -1 : static_cast<int32_t>(random() % static_cast<uint32_t>(node)));
    }
    const Nodes rule(parents, seq_lens);
    EXPECT_EQ(rule.found.first.fault, KvRangeFault::kNone);
    Ints positions(parents.size()), index = positions, next_token = positions, next_sibling = positions;
    draft_tree_positions(parents, seq_lens, positions);
    draft_tree_links(parents, nodes, index, next_token, next_sibling);
    EXPECT_EQ(rule.positions, positions);
    EXPECT_EQ(rule.index, index);
    EXPECT_EQ(rule.next_token, next_token);
    EXPECT_EQ(rule.next_sibling, next_sibling);
  }
}

/// Walks end, whatever parents are; such nodes are children of the root.
TEST(DraftNodesRule, ParentsThatAreNone_AreTheRoot) {
  const int32_t large = std::numeric_limits<int32_t>::max();
  for (const int32_t wrong : {-1, -2, 2, 3, large, std::numeric_limits<int32_t>::min()}) {
    const Nodes rule({-1, 0, wrong, 2}, {10});
    EXPECT_EQ(rule.found.first.fault, KvRangeFault::kParent);
    EXPECT_EQ(rule.found.first.row, 2);
    EXPECT_EQ(rule.positions, (Ints{10, 11, 11, 12}));
    EXPECT_EQ(rule.next_token, (Ints{1, -1, 3, -1}));
    EXPECT_EQ(rule.next_sibling, (Ints{-1, 2, -1, -1}));
  }
  const Nodes root({3, 0}, {10});
  EXPECT_EQ(root.found.first.fault, KvRangeFault::kRoot);
  EXPECT_EQ(root.positions, (Ints{10, 11}));
  const Nodes length({-1, 0, -1, 0}, {large, 4});
  EXPECT_EQ(length.found.first.fault, KvRangeFault::kLength);
  EXPECT_EQ(length.positions, (Ints{0, 1, 4, 5}));
}

/// The kernel's threads, three a request.
Bytes mask_by_rule(TreeMaskJob job, size_t size, Found& found) {
  Bytes mask(size + 5, 0xaa);
  job.mask = mask.data();
  job.capacity = static_cast<int64_t>(size);
  for (int32_t r = job.num_requests - 1; r >= 0; --r) {
    int64_t offset = 0;
    for (int32_t other = 0; other < r; ++other) offset += job.bounded_bytes(other);
    for (int32_t lane = 2; lane >= 0; --lane) write_mask(job, r, offset, lane, 3, found);
  }
  return mask;
}

TEST(TreeMaskRule, BytesAreTheHosts) {
  std::mt19937 random(9);
  for (int32_t round = 0; round < 60; ++round) {
    const int32_t nodes = 1 + round % 32;
    Ints parents, seq_lens;
    for (int32_t r = 0; r < 3; ++r) {
      seq_lens.push_back(static_cast<int32_t>(random() % 40));
      for (int32_t i = 0; i < nodes; ++i) {
        parents.push_back(i == 0 ? -1 : static_cast<int32_t>(random() % static_cast<uint32_t>(i)));
      }
    }
    for (int32_t f = 0; f < 5; ++f) {
      const auto form = static_cast<TreeMaskForm>(f);
      for (const int32_t window_left : {-1, 0, 2, 17}) {
        const TreeMaskShape shape{form, nodes, window_left};
        if (window_left >= 0 && !shape.is_full()) continue;
        SCOPED_TRACE(std::to_string(f) + ", window " + std::to_string(window_left));
        const auto bytes = static_cast<size_t>(tree_mask_bytes(form, seq_lens, nodes));
        Bytes expected(bytes, 0xaa);
        fill_tree_mask(form, parents, seq_lens, nodes, expected, window_left);
        const TreeMaskJob job{shape, parents.data(), seq_lens.data(), 3, nullptr, 0};
        // All of it, and as far as a shorter mask goes.
        for (const size_t size : {bytes, bytes - 1, bytes / 2, size_t{0}}) {
          Found found;
          Bytes cut(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(size));
          cut.resize(size + 5, 0xaa);
          EXPECT_EQ(mask_by_rule(job, size, found), cut);
          EXPECT_EQ(found.first.fault, size == bytes ? KvRangeFault::kNone : KvRangeFault::kMaskBytes);
        }
      }
    }
  }
}

TEST(TreeMaskRule, OneRequestMayFillTheMask) {
  const Ints parents{-1, 0}, seq_lens{1};
  Found found;
  const TreeMaskJob job{{TreeMaskForm::kFullMask, 2, -1}, parents.data(), seq_lens.data(), 1, nullptr, 0};
  const Bytes mask = mask_by_rule(job, 6, found);
  EXPECT_EQ(found.first.fault, KvRangeFault::kNone);
  EXPECT_EQ(Bytes(mask.begin(), mask.begin() + 6), (Bytes{1, 1, 0, 1, 1, 1}));
}

TEST(TreeMaskRule, FaultsAreReported) {
  const Ints parents{-1, 0, 5, -1, 0, 1}, seq_lens{-4, 2};
  Found found;
  const TreeMaskJob job{{TreeMaskForm::kFullMask, 3, -1}, parents.data(), seq_lens.data(), 2, nullptr, 0};
  const Bytes mask = mask_by_rule(job, 24, found);
  EXPECT_EQ(Bytes(mask.begin(), mask.begin() + 24),
            (Bytes{1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1}));
  EXPECT_EQ(found.first.request, 0);
  EXPECT_EQ(found.first.fault, KvRangeFault::kParent);
  const Ints longest{std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::max()};
  TreeMaskJob huge = job;
  huge.seq_lens = longest.data();
  Found too_long;
  mask_by_rule(huge, 24, too_long);
  EXPECT_EQ(too_long.first.fault, KvRangeFault::kMaskBytes);
}

}  // namespace
}  // namespace folio::inline v0::backends::token_pool
