#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "folio/folio.hpp"

/// Random batches: a cascade holds every key of every request once, in order, and the plan made of it reads at least as
/// many bytes less as the costs promised.
namespace folio::inline v0::attention {
namespace {

constexpr int32_t kPageSize = 4;

struct RandomBatch {
  explicit RandomBatch(std::mt19937& random) {
    const auto pick = [&](int32_t low, int32_t high) { return std::uniform_int_distribution(low, high)(random); };
    int32_t next_id = 0;
    std::vector<int32_t> row;
    const int32_t requests = pick(1, 40);
    const bool dense = pick(0, 1) == 0;
    columns = 60;
    for (int32_t r = 0; r < requests; ++r) {
      row.resize(static_cast<size_t>(
          pick(0, 9) == 0 ? 0 : pick(static_cast<int32_t>(row.size()) / 2, static_cast<int32_t>(row.size()))));
      for (int32_t more = pick(0, 3) == 0 ? pick(1, 20) : 1; more > 0 && row.size() < 60; --more) {
        row.push_back(next_id++);
      }
      auto tokens = static_cast<int32_t>(row.size()) * kPageSize - pick(0, kPageSize - 1);
      int32_t queries = pick(0, 4) == 0 ? pick(1, tokens) : 1;
      if (pick(0, 9) == 0) tokens = queries = 0;  // padding
      kv_len.push_back(tokens);
      cu_q.push_back(cu_q.back() + queries);
      entries.insert(entries.end(), row.begin(), row.end());
      indptr.push_back(static_cast<int32_t>(entries.size()));
      if (dense) entries.resize(static_cast<size_t>(columns) * static_cast<size_t>(r + 1), -1);
    }
    table = dense ? dense_table(entries, requests, columns) : csr_table(entries, indptr);
    batch = {requests, cu_q.data(), kv_len.data(), table};
  }
  std::vector<int32_t> cu_q{0}, kv_len, entries, indptr{0};
  int32_t columns = 0;
  PageTableView table;
  CascadeBatch batch;
};

int32_t page_of(const PageTableView& table, int32_t row, int32_t column) {
  const int64_t begin = table.kind == PageTableKind::kCsr ? table.indptr[row] : row * table.row_stride;
  return table.indices[begin + column];
}

/// The row of a segment that a request belongs to, or -1.
int32_t row_of(const KvSegment& segment, int32_t request) {
  if (segment.group_indptr == nullptr) return request;
  for (int32_t g = 0; g < segment.num_groups; ++g) {
    if (request >= segment.group_indptr[g] && request < segment.group_indptr[g + 1]) return g;
  }
  return -1;
}

void expect_all_keys_once(const RandomBatch& batch, const Cascade& cascade) {
  for (int32_t r = 0; r < batch.batch.num_requests; ++r) {
    const auto request = static_cast<size_t>(r);
    const int32_t computed = batch.kv_len[request] - (batch.cu_q[request + 1] - batch.cu_q[request]);
    int32_t position = 0;
    for (size_t s = 0; s < cascade.segments.size(); ++s) {
      const KvSegment& segment = cascade.segments[s];
      const int32_t row = row_of(segment, r);
      if (row < 0 || segment.kv_len[row] == 0) continue;
      ASSERT_EQ(segment.first_pos == nullptr ? 0 : segment.first_pos[row], position);
      for (int32_t t = 0; t < segment.kv_len[row]; t += kPageSize) {
        ASSERT_EQ(page_of(cascade.tables[s], row, t / kPageSize), page_of(batch.table, r, (position + t) / kPageSize));
      }
      position += segment.kv_len[row];
      if (segment.group_indptr != nullptr) {
        ASSERT_LE(position, computed);
      }
    }
    ASSERT_EQ(position, batch.kv_len[request]);
  }
}

AttentionOp make_op(std::mt19937& random) {
  const auto one_of = [&](std::vector<int32_t> values) {
    return values[std::uniform_int_distribution<size_t>(0, values.size() - 1)(random)];
  };
  AttentionConfig config;
  config.num_kv_heads = 2;
  config.num_q_heads = 2 * one_of({1, 4});
  config.head_dim_qk = config.head_dim_v = one_of({8, 16});
  config.page_size = kPageSize;
  config.window_left = one_of({-1, -1, 0, 30, 90});
  return prepare(Context::cpu({.executor = {}, .num_threads = one_of({1, 4}), .force_kernel = {}}), config);
}

PlanSummary summary_of(const AttentionOp& op, const RandomBatch& batch, const Cascade& cascade) {
  BatchView view;
  view.num_requests = batch.batch.num_requests;
  view.num_tokens = batch.cu_q.back();
  view.cu_q = batch.cu_q.data();
  view.segments = cascade.segments;
  PlanBuffer buffer = make_plan_buffer(op);
  return summary(plan(op, view, buffer));
}

TEST(CascadeProperties, AnyBatch_ReadsEachKeyOnceAndKeepsItsPromises) {
  std::mt19937 random(5);
  int32_t cascades = 0, nested = 0;
  for (int32_t i = 0; i < 1500; ++i) {
    SCOPED_TRACE(i);
    const RandomBatch batch(random);
    const AttentionOp op = make_op(random);
    CascadeCosts costs = cascade_costs(op);
    if (i % 2 == 0) costs.q_row_bytes = costs.partial_row_bytes = 0;
    CascadePlanner none(costs, 0);
    const PlanSummary alone = summary_of(op, batch, none.discover(batch.batch));
    const int32_t most = 1 + i % kMaxCascadeLevels;
    CascadePlanner planner(costs, most);
    const Cascade& cascade = planner.discover(batch.batch);
    expect_all_keys_once(batch, cascade);
    if (HasFatalFailure()) return;
    ASSERT_LE(cascade.num_levels(), most);
    ASSERT_EQ(cascade.bytes_saved > 0, cascade.num_levels() > 0);
    cascades += cascade.num_levels() > 0 ? 1 : 0;
    nested += cascade.num_levels() > 1 ? 1 : 0;
    const PlanSummary shared = summary_of(op, batch, cascade);
    const int64_t saved = (alone.kv_tokens_read - shared.kv_tokens_read) * costs.kv_token_bytes;
    ASSERT_GE(saved, cascade.bytes_saved * op.config().num_kv_heads);
  }
  EXPECT_GT(cascades, 500);
  EXPECT_GT(nested, 100);
}

}  // namespace
}  // namespace folio::inline v0::attention
