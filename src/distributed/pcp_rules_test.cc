// What PcpAttention promises besides its results: what it sends, what it refuses and when, invariance.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "distributed/expectations_test_util.hpp"
#include "distributed/pcp_case_test_util.hpp"

namespace folio::distributed::testing {
namespace {

using ::testing::HasSubstr;

const Context& pcp_context() {
  static const Context shared = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  return shared;
}

PcpSetup three_requests() {
  PcpSetup setup;
  setup.whole.requests = {{5, 1}, {70, 4}, {164, 37}};
  return setup;
}

PcpPlan plan_of(const PcpSetup& setup) {
  auto groups = make_thread_groups(setup.whole.world, {std::chrono::seconds(40)});
  const PcpCase divided(setup);
  PcpAttention attention(pcp_context(), *groups[0], divided.config());
  return attention.plan(divided.batch());
}

/// One rank's step with arguments that change(args) has changed.
template <typename Change>
void run_changed(PcpCase& divided, ProcessGroup& group, Change change) {
  PcpAttention attention(pcp_context(), group, divided.config());
  const PcpPlan plan = attention.plan(divided.batch());
  core::AlignedBuffer workspace(attention.workspace_size(plan), core::AlignedBuffer::kWorkspaceAlignment);
  PcpArgs args = divided.args(group.rank());
  change(args);
  attention.run(plan, args, {workspace.data(), workspace.bytes()});
  divided.note_p_dtype(attention);
}

TEST(PcpAttention, BoundsSayWhatAStepMayBe) {
  PcpSetup setup = three_requests();
  setup.bounds = GraphBounds{3, 42, 37, 164, 0};
  EXPECT_EQ(plan_of(setup).exchange, PcpExchange::kPassQ);
  setup.max_tokens = 25;
  EXPECT_EQ(plan_of(setup).max_tokens, 25);
  const auto refused = [&](auto change, const char* text) {
    PcpSetup changed = setup;
    change(changed);
    expect_error(ErrorCode::kInvalidArgument, text, [&] { plan_of(changed); });
  };
  refused([](PcpSetup& s) { s.bounds->max_requests = 2; }, "num_requests is 3; the bounds allow 2");
  refused([](PcpSetup& s) { s.bounds->max_tokens = 41; }, "the batch has 42 new tokens; the bounds allow 41");
  refused([](PcpSetup& s) { s.bounds->max_q_len = 36; }, "request 2 has 37 new tokens; the bounds allow 36");
  refused([](PcpSetup& s) { s.bounds->max_kv_len = 163; }, "request 2: seq_lens is 164; the bounds allow 163");
  refused([](PcpSetup& s) { s.bounds->max_shared_levels = 1; }, "bounds.max_shared_levels is 1");
  refused([](PcpSetup& s) { s.bounds.reset(); }, "max_tokens is 25; without PcpConfig::bounds it is 0");
  refused([](PcpSetup& s) { s.max_tokens = 20; }, "max_tokens is 20; it is 0, or from the most tokens of a rank, 22");
  refused([](PcpSetup& s) { s.max_tokens = 28; }, "to 27, the most within the bounds");
  setup.exchange = PcpExchange::kPassKv;
  expect_error(ErrorCode::kUnsupported, "exchange is kPassKv with bounds", [&] { plan_of(setup); });
}

TEST(PcpAttention, WorkspacesOfBoundsHoldAnyStep) {
  PcpSetup setup = three_requests();
  auto groups = make_thread_groups(2, {std::chrono::seconds(40)});
  const PcpCase unbounded(setup);
  expect_error(ErrorCode::kInvalidArgument, "only PcpConfig::bounds says", [&] {
    static_cast<void>(PcpAttention(pcp_context(), *groups[0], unbounded.config()).workspace_size());
  });
  setup.bounds = GraphBounds{3, 42, 37, 164, 0};
  setup.max_tokens = 27;
  PcpCase divided(setup);
  PcpAttention attention(pcp_context(), *groups[0], divided.config());
  EXPECT_EQ(attention.workspace_size(attention.plan(divided.batch())), attention.workspace_size());
  PcpArgs args = divided.args(0);
  args.out.shape[0] = 26;
  core::AlignedBuffer workspace(attention.workspace_size(), core::AlignedBuffer::kWorkspaceAlignment);
  expect_error(ErrorCode::kInvalidArgument, "out has 26 tokens; the plan has 27", [&] {
    attention.run(attention.plan(divided.batch()), args, {workspace.data(), workspace.bytes()});
  });
}

TEST(PcpAttention, PassesOlderTokensTheCheaperWay) {
  // On two ranks, 32 of 64 older tokens each: one page of 32 tokens.
  PcpSetup setup;
  setup.whole.requests = {{64 + 10, 10}};
  const int64_t q_token = 4 * (16 * 4 + 28 * 4), kv_token = 2 * (16 + 24) * 4;
  const PcpPlan few = plan_of(setup);
  EXPECT_EQ(few.max_tokens, 5);
  EXPECT_EQ(few.pass_q_bytes, 5 * q_token);
  EXPECT_EQ(few.pass_kv_bytes, 32 * kv_token);
  EXPECT_EQ(few.exchange, PcpExchange::kPassQ);
  setup.whole.requests = {{64 + 100, 100}};
  const PcpPlan many = plan_of(setup);
  EXPECT_EQ(many.pass_q_bytes, 50 * q_token);
  EXPECT_EQ(many.pass_kv_bytes, 32 * kv_token);
  EXPECT_EQ(many.exchange, PcpExchange::kPassKv);
  setup.exchange = PcpExchange::kPassQ;
  EXPECT_EQ(plan_of(setup).exchange, PcpExchange::kPassQ);
  setup.exchange = PcpExchange::kAutomatic;
  setup.whole.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(plan_of(setup).exchange, PcpExchange::kPassQ) << "a batch may not decide";
  setup = {};
  setup.whole.requests = {{9, 9}, {300, 0}};
  const PcpPlan prompts = plan_of(setup);
  EXPECT_EQ(prompts.exchange, PcpExchange::kAutomatic) << "no query has older tokens";
  EXPECT_FALSE(prompts.older);
  EXPECT_EQ(prompts.pass_kv_bytes, 0);
}

TEST(PcpAttention, SendsOnlyWhatTheWindowSees) {
  PcpSetup setup;
  setup.whole.requests = {{1000 + 100, 100}};
  setup.exchange = PcpExchange::kPassKv;
  setup.whole.window_left = 40;  // from position 960 on, that is from page 15 of each rank's 32 tokens on
  const int64_t kv_token = 2 * (16 + 24) * 4;
  EXPECT_EQ(plan_of(setup).pass_kv_bytes, 32 * kv_token);
  // Pages before it may be anybody's by now.
  PcpCase divided(setup);
  for (DcpCase::Rank& rank : divided.whole.ranks) std::fill_n(rank.table.begin(), 15, -1);
  divided.run_in_threads();
  EXPECT_EQ(divided.wrong_outputs(), "");
  setup.whole.window_left = 0;
  EXPECT_FALSE(plan_of(setup).older) << "a query sees itself alone";
}

TEST(PcpAttention, MovesWhatItSays) {
  for (const PcpExchange exchange : {PcpExchange::kPassQ, PcpExchange::kPassKv}) {
    PcpSetup setup = three_requests();
    setup.whole.world = 4;
    setup.exchange = exchange;
    PcpCase divided(setup);
    const auto group = make_simulated_group(4);
    PcpAttention attention(pcp_context(), *group, divided.config());
    const PcpPlan plan = attention.plan(divided.batch());
    core::AlignedBuffer workspace(attention.workspace_size(plan), core::AlignedBuffer::kWorkspaceAlignment);
    attention.run(plan, divided.args(0), {workspace.data(), workspace.bytes()});
    const int64_t kv_row = 2 * (16 + 24) * 4;
    const int64_t fresh = (plan.max_tokens + 1) * kv_row;  // one row holds the header
    const int64_t older = exchange == PcpExchange::kPassQ ? plan.pass_q_bytes : plan.pass_kv_bytes;
    EXPECT_EQ(group->traffic().bytes_sent, 3.0 * static_cast<double>(fresh + older));
    EXPECT_EQ(group->traffic().operations, exchange == PcpExchange::kPassQ ? 3 : 2);
  }
}

TEST(PcpAttention, PartialResultsAreFloat32AndSinksCountOnce) {
  PcpSetup setup = three_requests();
  setup.whole.sinks = true;
  auto groups = make_thread_groups(2, {std::chrono::seconds(40)});
  const PcpAttention attention(pcp_context(), *groups[0], PcpCase(setup).config());
  EXPECT_TRUE(attention.fresh_op().config().features.has(Feature::kSinks));
  for (const AttentionOp* op : {&attention.shard_op(), &attention.gathered_op()}) {
    EXPECT_FALSE(op->config().features.has(Feature::kSinks));
    EXPECT_EQ(op->config().out, DType::kFloat32);
    EXPECT_EQ(op->config().num_q_heads, 4) << "every rank has all heads";
  }
}

TEST(PcpAttention, RefusesConfigurations) {
  auto groups = make_thread_groups(2, {std::chrono::seconds(40)});
  const auto refused = [&](ErrorCode code, const char* text, auto change) {
    PcpConfig config = PcpCase(three_requests()).config();
    change(config);
    expect_error(code, text, [&] { PcpAttention(pcp_context(), *groups[0], config); });
  };
  refused(ErrorCode::kInvalidArgument, "interleave is 0", [](PcpConfig& c) { c.interleave = 0; });
  refused(ErrorCode::kInvalidArgument, "does not divide the page size (32)", [](PcpConfig& c) { c.interleave = 3; });
  refused(ErrorCode::kInvalidArgument, "exchange is 7", [](PcpConfig& c) { c.exchange = static_cast<PcpExchange>(7); });
  refused(ErrorCode::kInvalidArgument, "force_kernel is", [](PcpConfig& c) { c.force_kernel = "none such"; });
  refused(ErrorCode::kUnsupported, "kCausal and kNone", [](PcpConfig& c) { c.attention.mask = MaskKind::kCustom; });
  for (const Feature feature : {Feature::kRopeLlama, Feature::kSpans, Feature::kRequestCausal, Feature::kKvStart}) {
    refused(ErrorCode::kUnsupported, "takes kSoftCap, kAlibi and kSinks",
            [&](PcpConfig& c) { c.attention.features = Features(feature); });
  }
  refused(ErrorCode::kUnsupported, "kScheduleInvariant",
          [](PcpConfig& c) { c.attention.determinism = Determinism::kScheduleInvariant; });
  refused(ErrorCode::kUnsupported, "exchange is kPassKv over a cache of int8",
          [](PcpConfig& c) { c.attention.kv = DType::kInt8, c.exchange = PcpExchange::kPassKv; });
}

TEST(PcpAttention, RefusesBatches) {
  auto groups = make_thread_groups(2, {std::chrono::seconds(40)});
  PcpAttention attention(pcp_context(), *groups[0], PcpCase(three_requests()).config());
  const std::vector<int32_t> cu_q{0, 2, 3}, seq_lens{1, 4}, descending{0, 2, 1}, late{1, 2, 3};
  const auto refused = [&](const char* text, const PcpBatch& batch) {
    expect_error(ErrorCode::kInvalidArgument, text, [&] { attention.plan(batch); });
  };
  refused("request 0: seq_lens is 1; it has 2 new tokens", {2, cu_q.data(), seq_lens.data()});
  refused("request 1: cu_q descends", {2, descending.data(), cu_q.data() + 1});
  refused("cu_q[0] is 1", {2, late.data(), cu_q.data() + 1});
  refused("cu_q is null", {2, nullptr, seq_lens.data()});
  refused("seq_lens is null", {2, cu_q.data(), nullptr});
  refused("num_requests is -1", {-1, cu_q.data(), seq_lens.data()});
}

// One rank alone: if anything were sent, it would wait for the other.
TEST(PcpAttention, RefusesArgumentsBeforeAnythingIsSentOrWritten) {
  for (const PcpExchange exchange : {PcpExchange::kPassQ, PcpExchange::kPassKv}) {
    auto groups = make_thread_groups(2, {std::chrono::seconds(40)});
    PcpSetup setup = three_requests();
    setup.exchange = exchange;
    PcpCase divided(setup);
    PcpAttention attention(pcp_context(), *groups[0], divided.config());
    const PcpPlan plan = attention.plan(divided.batch());
    core::AlignedBuffer workspace(attention.workspace_size(plan), core::AlignedBuffer::kWorkspaceAlignment);
    const Workspace memory{workspace.data(), workspace.bytes()};
    const std::vector<float> scales(4, 1.0f), zeros(4, 0.0f);
    const auto refused = [&](const char* text, auto change) {
      PcpArgs args = divided.args(0);
      const std::vector<std::byte> before = divided.ranks[0].out;
      change(args);
      expect_error(ErrorCode::kInvalidArgument, text, [&] { attention.run(plan, args, memory); });
      EXPECT_EQ(divided.ranks[0].out, before);
    };
    refused("q has 3 tokens; the plan has", [](PcpArgs& a) { a.q.shape[0] = 3; });
    refused("q is [", [](PcpArgs& a) { a.q.shape[1] = 8; });
    refused("out is bfloat16", [](PcpArgs& a) { a.out.dtype = DType::kBFloat16; });
    refused("k is [", [](PcpArgs& a) { a.k.shape[1] = 1; });
    refused("k is float16", [](PcpArgs& a) { a.k.dtype = DType::kFloat16; });
    refused("v has 2 tokens", [](PcpArgs& a) { a.v.shape[0] = 2; });
    refused("page_size 16", [](PcpArgs& a) { a.cache.page_size = 16; });
    refused("a table of 1 rows", [](PcpArgs& a) { a.table.num_rows = 1; });
    refused("alibi_slopes is given", [&](PcpArgs& a) { a.alibi_slopes = scales.data(); });
    refused("sinks is given", [&](PcpArgs& a) { a.sinks = scales.data(); });
    refused("logits_soft_cap is given", [](PcpArgs& a) { a.logits_soft_cap = 1.0f; });
    refused("q_scale is given", [](PcpArgs& a) { a.q_scale.value = 2.0f; });
    refused("k_scale is per request and has no data",
            [](PcpArgs& a) { a.k_scale.granularity = ScaleGranularity::kPerRequest; });
    refused("k_scale", [&](PcpArgs& a) { a.k_scale = {1.0f, zeros.data(), ScaleGranularity::kPerRequest}; });
    const PcpArgs args = divided.args(0);
    expect_error(ErrorCode::kWorkspaceTooSmall, "are needed", [&] {
      attention.run(plan, args, {workspace.data(), workspace.bytes() - 1});
    });
    expect_error(ErrorCode::kInvalidArgument, "256", [&] {
      attention.run(plan, args, {static_cast<std::byte*>(workspace.data()) + 4, workspace.bytes()});
    });
    attention.plan(divided.batch());
    expect_error(ErrorCode::kStalePlan, "planned again", [&] { attention.run(plan, args, memory); });
    expect_error(ErrorCode::kStalePlan, "planned again", [&] { attention.workspace_size(plan); });
  }
}

TEST(PcpAttention, RanksOfDifferentBatchesAllThrow) {
  const auto refused = [](const PcpSetup& of_one, const PcpSetup& of_the_other) {
    run_ranks(2, [&](ProcessGroup& group) {
      PcpCase divided(group.rank() == 0 ? of_one : of_the_other);
      expect_error(ErrorCode::kInvalidArgument, "runs another batch or configuration than rank",
                   [&] { divided.run(group, pcp_context()); });
    });
  };
  const PcpSetup setup = three_requests();
  PcpSetup other = setup;
  other.whole.requests[1].seq_len = 71;
  refused(setup, other);
  other = setup;
  other.whole.window_left = 100;
  refused(setup, other);
  other = setup;
  other.exchange = PcpExchange::kPassKv;
  refused(setup, other);
  // Pieces of other sizes: the group finds it.
  other = setup;
  other.whole.requests.push_back({40, 40});
  run_ranks(2, [&](ProcessGroup& group) {
    PcpCase divided(group.rank() == 0 ? setup : other);
    expect_error(ErrorCode::kUnavailable, "", [&] { divided.run(group, pcp_context()); });
  });
}

// Each rank attends with the queries, or the keys, of all, by what it has itself.
TEST(PcpAttention, RanksOfDifferentScalesAllThrow) {
  PcpSetup setup = three_requests();
  setup.whole.model = DType::kBFloat16;
  setup.whole.cache = DType::kFloat8E4M3;
  setup.whole.soft_cap = 2.0f;
  setup.whole.alibi = true;
  const auto refused = [&](const char* text, PcpExchange exchange, auto change) {
    setup.exchange = exchange;
    run_ranks(2, [&](ProcessGroup& group) {
      PcpCase divided(setup);
      expect_error(ErrorCode::kInvalidArgument, text, [&] {
        run_changed(divided, group, [&](PcpArgs& args) {
          if (group.rank() == 1) change(args);
        });
      });
      const std::vector<std::byte> after = divided.ranks[static_cast<size_t>(group.rank())].out;
      divided.args(group.rank());  // nothing is written
      EXPECT_EQ(divided.ranks[static_cast<size_t>(group.rank())].out, after);
    });
  };
  const std::vector<float> slopes{0.1f, 0.2f, 0.3f, 0.5f}, per_head{1.0f, 2.0f};
  refused("sm_scale of rank", PcpExchange::kPassQ, [](PcpArgs& a) { a.sm_scale = 0.5f; });
  refused("logits_soft_cap of rank", PcpExchange::kPassQ, [](PcpArgs& a) { a.logits_soft_cap = 1.0f; });
  refused("alibi_slopes of rank", PcpExchange::kPassQ, [&](PcpArgs& a) { a.alibi_slopes = slopes.data(); });
  refused("k_scale of rank", PcpExchange::kPassKv, [](PcpArgs& a) { a.k_scale.value = 2.0f; });
  const std::vector<float> per_request{1.0f, 1.0f, 2.0f};
  refused("k_scale of rank", PcpExchange::kPassKv, [&](PcpArgs& a) {
    a.k_scale = {1.0f, per_request.data(), ScaleGranularity::kPerRequest};
  });
  refused("v_scale of rank", PcpExchange::kPassKv, [&](PcpArgs& a) {
    a.v_scale = {1.0f, per_head.data(), ScaleGranularity::kPerHead};
  });
}

TEST(PcpAttention, ADefaultScaleIsAsGoodAsItsValue) {
  PcpSetup setup = three_requests();
  PcpCase divided(setup);
  run_ranks(2, [&](ProcessGroup& group) {
    run_changed(divided, group, [&](PcpArgs& args) {
      if (group.rank() == 1) args.sm_scale = 1.0f / std::sqrt(static_cast<float>(setup.whole.dim_qk));
    });
  });
  EXPECT_EQ(divided.wrong_outputs(), "");
}

// Under pass-Q a shard's scales are its own, and need not have the others' form.
TEST(PcpAttention, AShardHasScalesOfItsOwn) {
  PcpSetup setup = three_requests();
  setup.whole.model = DType::kBFloat16;
  setup.whole.cache = DType::kFloat8E4M3;
  setup.exchange = PcpExchange::kPassQ;
  PcpCase divided(setup);
  const std::vector<float> ones(3, 1.0f);
  run_ranks(2, [&](ProcessGroup& group) {
    run_changed(divided, group, [&](PcpArgs& args) {
      if (group.rank() == 1) args.k_scale = {1.0f, ones.data(), ScaleGranularity::kPerRequest};
    });
  });
  EXPECT_EQ(divided.wrong_outputs(), "");
}

TEST(PcpAttention, ScalesPerRequestAreThoseOfRequestsAlone) {
  const std::vector<RequestLengths> requests{{150, 20, 0}, {30, 0, 1}, {99, 33, 2}};
  const std::vector<float> k_scales{0.5f, 9.0f, 2.0f}, v_scales{1.0f, 2.0f, 9.0f, 9.0f, 3.0f, 0.25f};
  for (const PcpExchange exchange : {PcpExchange::kPassQ, PcpExchange::kPassKv}) {
    PcpSetup setup;
    setup.exchange = exchange;
    setup.whole.model = DType::kBFloat16;
    setup.whole.cache = DType::kFloat8E4M3;
    setup.whole.determinism = Determinism::kBatchInvariant;
    const auto run_all = [&](PcpCase& divided, auto change) {
      run_ranks(2, [&](ProcessGroup& group) { run_changed(divided, group, change); });
      divided.wrong_outputs();  // which puts the results together: with these scales they are others than the oracle's
    };
    setup.whole.requests = requests;
    PcpCase together(setup);
    run_all(together, [&](PcpArgs& args) {
      args.k_scale = {1.0f, k_scales.data(), ScaleGranularity::kPerRequest};
      args.v_scale = {1.0f, v_scales.data(), ScaleGranularity::kPerRequestAndHead, 2};
    });
    const auto row = static_cast<std::ptrdiff_t>(setup.whole.heads * setup.whole.dim_v * 2);
    for (const size_t i : {size_t{0}, size_t{2}}) {
      setup.whole.requests = {requests[i]};
      PcpCase alone(setup);
      run_all(alone, [&](PcpArgs& args) {
        args.k_scale.value = k_scales[i];
        args.v_scale = {1.0f, v_scales.data() + 2 * i, ScaleGranularity::kPerHead};
      });
      const std::vector<std::byte>& own = alone.whole.ranks[0].out;
      EXPECT_TRUE(std::equal(own.begin(), own.begin() + requests[i].q_len * row,
                             together.whole.ranks[0].out.begin() + together.whole.cu_q[i] * row))
          << "request " << i;
    }
  }
}

TEST(PcpAttention, PlansAgainOverOtherBatches) {
  PcpSetup setup = three_requests();
  setup.whole.world = 3;
  PcpCase first(setup);
  setup.whole.requests = {{300, 120}, {64, 64}, {31, 1}, {90, 5}};
  PcpCase second(setup);
  run_ranks(3, [&](ProcessGroup& group) {
    PcpAttention attention(pcp_context(), group, first.config());
    first.run(attention);
    second.run(attention);
    first.run(attention);
  });
  EXPECT_EQ(first.wrong_outputs(), "");
  EXPECT_EQ(second.wrong_outputs(), "");
}

TEST(PcpAttention, PagesOfAnySize) {
  for (const PcpExchange exchange : {PcpExchange::kPassQ, PcpExchange::kPassKv}) {
    for (const int32_t page_size : {1, 6, 256}) {
      PcpSetup setup = three_requests();
      setup.exchange = exchange;
      setup.whole.world = 3;
      setup.whole.page_size = page_size;
      setup.whole.window_left = 50;
      PcpCase divided(setup);
      divided.run_in_threads();
      EXPECT_EQ(divided.wrong_outputs(), "") << page_size;
    }
  }
}

// More ranks than a request has chunks of tokens, and than a GPU's kernels take segments.
TEST(PcpAttention, ManyRanks) {
  for (const PcpExchange exchange : {PcpExchange::kPassQ, PcpExchange::kPassKv}) {
    PcpSetup setup = three_requests();
    setup.exchange = exchange;
    setup.whole.world = 11;
    PcpCase divided(setup);
    divided.run_in_threads();
    EXPECT_EQ(divided.wrong_outputs(), "");
    EXPECT_TRUE(std::ranges::all_of(divided.ranks, [&](const PcpCase::Rank& r) { return r.exchange == exchange; }));
  }
}

TEST(PcpAttention, BatchInvariantRowsKeepTheirBits) {
  for (const PcpExchange exchange : {PcpExchange::kAutomatic, PcpExchange::kPassKv}) {
    PcpSetup setup = three_requests();
    setup.exchange = exchange;
    setup.whole.sinks = setup.whole.alibi = true;
    setup.whole.determinism = Determinism::kBatchInvariant;
    setup.whole.requests = {{300, 90, 7}};
    PcpCase alone(setup);
    setup.whole.requests = {{1000, 33, 1}, {300, 90, 7}, {1, 1, 2}, {77, 20, 3}};
    PcpCase among(setup);
    alone.run_in_threads();
    among.run_in_threads();
    EXPECT_EQ(alone.wrong_outputs(), "");
    EXPECT_EQ(among.wrong_outputs(), "");
    const auto bytes = static_cast<std::ptrdiff_t>(setup.whole.heads * setup.whole.dim_v * 4);
    const DcpCase::Rank &a = alone.whole.ranks[0], &b = among.whole.ranks[0];
    EXPECT_TRUE(std::equal(a.out.begin(), a.out.begin() + 90 * bytes, b.out.begin() + 33 * bytes));
    EXPECT_TRUE(std::equal(a.lse.begin(), a.lse.begin() + 90 * 4, b.lse.begin() + 33 * 4));
  }
}

}  // namespace
}  // namespace folio::distributed::testing
