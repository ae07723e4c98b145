#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "folio/backends/cascade.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kPageSize = 16;

AttentionOp op_of(int32_t window_left = -1, Features features = {}, Determinism determinism = Determinism::kRunToRun) {
  AttentionConfig config;
  config.num_q_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = 64;
  config.page_size = kPageSize;
  config.window_left = window_left;
  config.features = features;
  config.determinism = determinism;
  return prepare(Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}}), config);
}

/// `count` requests of `query_len` new tokens after the same `shared` pages, and one request without tokens.
struct Sharers {
  Sharers(int32_t count, int32_t shared, int32_t query_len = 1) {
    columns = shared + 8;
    for (int32_t r = 0; r < count; ++r) {
      for (int32_t page = 0; page < columns; ++page) table.push_back(page < shared ? page : 1000 * (r + 1) + page);
      starts.push_back(starts.back() + query_len);
      lens.push_back(shared * kPageSize + 5 + query_len);
    }
    table.resize(table.size() + static_cast<size_t>(columns), -1);
    starts.push_back(starts.back());
    lens.push_back(0);
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.num_reqs = count + 1;
    batch.num_actual_tokens = starts.back();
    batch.block_table = {table.data(), count + 1, columns, columns};
  }
  std::vector<int32_t> starts{0}, lens, table;
  int32_t columns;
  CommonAttentionMetadata batch;
};

int32_t levels(const StepCascadeOptions& options, int32_t common_prefix_len, const Sharers& sharers,
               const std::vector<AttentionOp>& ops = {op_of()}) {
  StepCascade cascade(ops, options);
  return cascade.plan(common_prefix_len, sharers.batch).num_levels();
}

TEST(StepCascade, ModesDecide) {
  const Sharers sharers(40, 64);
  const int32_t prefix = 64 * kPageSize;
  EXPECT_EQ(levels({.mode = CascadeMode::kOff}, prefix, sharers), 0);
  // Folio needs no common_prefix_len; vLLM's rule does.
  EXPECT_EQ(levels({.mode = CascadeMode::kAuto}, 0, sharers), 1);
  EXPECT_EQ(levels({.mode = CascadeMode::kAuto, .max_levels = 0}, 0, sharers), 0);
  EXPECT_EQ(levels({.mode = CascadeMode::kHeuristic}, 0, sharers), 0);
  EXPECT_EQ(levels({.mode = CascadeMode::kHeuristic}, prefix, sharers), 1);
}

TEST(StepCascade, TheHeuristicSeesTheUsablePrefixAndTheLayers) {
  const Sharers sharers(40, 64);
  const StepCascadeOptions options{.mode = CascadeMode::kHeuristic};
  // Whole pages, 256 tokens at least.
  EXPECT_EQ(levels(options, 255, sharers), 0);
  EXPECT_EQ(levels(options, 271, sharers), 1);
  // Computed before the step: of 256 tokens in common 250 are new.
  Sharers fresh(40, 16, 250);
  for (int32_t& len : fresh.lens) len = len > 0 ? 256 : 0;
  EXPECT_EQ(levels(options, 256, fresh), 0);
  EXPECT_EQ(levels(options, 1024, sharers, {op_of(), op_of(2000)}), 0);
  EXPECT_EQ(levels(options, 1024, sharers, {op_of(-1, Feature::kAlibi)}), 0);
  StepCascadeOptions local = options;
  local.use_local_attention = true;
  EXPECT_EQ(levels(local, 1024, sharers), 0);
  StepCascadeOptions wide = options;  // enough processors for every request's own keys in one wave
  wide.num_sms = 100000;
  EXPECT_EQ(levels(wide, 1024, sharers), 0);
  EXPECT_EQ(levels(options, 1024, Sharers(7, 64)), 0);  // the request without tokens is no eighth
}

TEST(StepCascade, AutoTakesWindowsAndAlibiToo) {
  const Sharers sharers(40, 64);
  const StepCascadeOptions options;
  EXPECT_EQ(levels(options, 0, sharers, {op_of(-1, Feature::kAlibi)}), 1);
  EXPECT_EQ(levels(options, 0, sharers, {op_of(500)}), 1);
  EXPECT_EQ(levels(options, 0, sharers, {op_of(3)}), 0);           // nothing shared is seen
  EXPECT_EQ(levels(options, 0, sharers, {op_of(3), op_of()}), 1);  // but by the layers without a window
  EXPECT_EQ(levels(options, 0, sharers, {op_of(3), op_of(500)}), 1);
}

TEST(StepCascade, InvariantLevelsHaveNone) {
  const Sharers sharers(40, 64);
  for (const Determinism level : {Determinism::kBatchInvariant, Determinism::kScheduleInvariant}) {
    const std::vector<AttentionOp> ops{op_of(-1, {}, level)};
    EXPECT_EQ(levels({.mode = CascadeMode::kAuto}, 0, sharers, ops), 0);
    EXPECT_EQ(levels({.mode = CascadeMode::kHeuristic}, 1024, sharers, ops), 0);
  }
}

TEST(StepCascade, Names) {
  for (const CascadeMode mode : {CascadeMode::kOff, CascadeMode::kHeuristic, CascadeMode::kAuto}) {
    EXPECT_EQ(cascade_mode_from_name(to_string(mode)), mode);
  }
  EXPECT_THROW(cascade_mode_from_name("on"), Error);
}

std::string refusal(const std::function<void()>& call, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return "accepted";
}

TEST(StepCascade, Refusals) {
  Sharers sharers(40, 64);
  const std::vector<AttentionOp> ops{op_of()};
  StepCascade cascade(ops, {});
  EXPECT_THAT(refusal([&] { cascade.plan(-1, sharers.batch); }), HasSubstr("common_prefix_len is -1"));
  EXPECT_THAT(refusal([&] { StepCascade({}, {}); }), HasSubstr("there are no ops"));
  EXPECT_THAT(refusal([&] { StepCascade(ops, {.num_sms = 0}); }), HasSubstr("num_sms is 0"));
  EXPECT_THAT(refusal([&] { StepCascade(ops, {.mode = static_cast<CascadeMode>(7)}); }), HasSubstr("mode is 7"));
  CommonAttentionMetadata batch = sharers.batch;
  batch.seq_lens = batch.seq_lens.first(3);
  EXPECT_THAT(refusal([&] { cascade.plan(0, batch); }), HasSubstr("seq_lens 3; num_reqs is 41"));
  batch = sharers.batch;
  batch.where = Where::kDevice;
  EXPECT_THAT(refusal([&] { cascade.plan(0, batch); }), HasSubstr("arrays are on a device; the context is a CPU's"));
  // The engine's books and the block table disagree.
  sharers.table[static_cast<size_t>(5 * sharers.columns + 20)] = 7;
  StepCascade heuristic(ops, {.mode = CascadeMode::kHeuristic});
  EXPECT_THAT(refusal([&] { heuristic.plan(1024, sharers.batch); }),
              HasSubstr("request 5 has page 7 at column 20, request 0 page 20"));
  EXPECT_EQ(heuristic.plan(320, sharers.batch).num_levels(), 1);
}

/// The rule sees lengths before the planner has checked them.
TEST(StepCascade, TheHeuristicRefusesWrongLengths) {
  const std::vector<AttentionOp> ops{op_of()};
  StepCascade heuristic(ops, {.mode = CascadeMode::kHeuristic});
  const auto refused = [&](const std::function<void(Sharers&)>& spoil) {
    Sharers sharers(40, 64);
    spoil(sharers);
    return refusal([&] { heuristic.plan(1024, sharers.batch); });
  };
  EXPECT_THAT(refused([](Sharers& sharers) { sharers.starts[3] = 7; }), HasSubstr("request 3: q_len is -3"));
  EXPECT_THAT(refused([](Sharers& sharers) { sharers.lens[2] = -5; }),
              HasSubstr("request 2: q_len is 1 and kv_len -5"));
  CascadeBatch none;
  none.num_requests = 2;
  EXPECT_THAT(refusal([&] { heuristic.plan(1024, none); }), HasSubstr("cu_q or kv_len is null"));
  none.num_requests = -1;
  EXPECT_THAT(refusal([&] { heuristic.plan(1024, none); }), HasSubstr("num_requests is -1"));
}

}  // namespace
}  // namespace folio::inline v0::backends
