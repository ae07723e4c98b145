// What DcpAttention promises besides its results: heads counted once, what it refuses and when, NaN, invariance.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "distributed/dcp_case_test_util.hpp"
#include "distributed/expectations_test_util.hpp"
#include "folio/types/float_convert.hpp"
#include "kernels/cuda/common/peer_memory/peer_memory.hpp"

namespace folio::distributed::testing {
namespace {

using ::testing::HasSubstr;

const Context& context() {
  static const Context shared = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  return shared;
}

DcpSetup small_setup() {
  DcpSetup setup;
  setup.requests = {{5, 1}, {70, 4}, {64, 17}};
  return setup;
}

// The originals multiplied the heads by the ranks twice, and once where queries are local.
TEST(DcpAttention, HeadsOfAllRanksOnceAndOnlyOverTheShard) {
  DcpSetup setup = small_setup();
  setup.world = 4;
  setup.sinks = true;
  const DcpCase whole(setup);
  auto groups = make_thread_groups(4, {std::chrono::seconds(40)});
  const DcpAttention attention(context(), *groups[1], whole.config());
  EXPECT_EQ(attention.cached_op().config().num_q_heads, 16);
  EXPECT_EQ(attention.fresh_op().config().num_q_heads, 4);
  EXPECT_EQ(attention.cached_op().config().num_kv_heads, 2);
  // A sink counts once, with the new tokens; partial results are float32.
  EXPECT_FALSE(attention.cached_op().config().features.has(Feature::kSinks));
  EXPECT_TRUE(attention.fresh_op().config().features.has(Feature::kSinks));
  EXPECT_EQ(attention.cached_op().config().out, DType::kFloat32);
  EXPECT_EQ(attention.fresh_op().config().out, DType::kFloat32);
  EXPECT_EQ(attention.config().partial_dtype, DType::kFloat32) << "the default is resolved";
}

/// What rank 0 of a group sends to the others for one layer.
double sent_by_a_layer(const DcpSetup& setup) {
  DcpCase whole(setup);
  const auto group = make_simulated_group(setup.world);
  whole.run(*group, context());
  return group->traffic().bytes_sent;
}

// A simulated group counts what its operations are given: partial results that travelled as float32 would be seen.
TEST(DcpAttention, SixteenBitPartialResultsMoveHalfTheBytes) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    DcpSetup setup = small_setup();
    setup.model = setup.cache = dtype;
    setup.world = 4;
    setup.replicated_queries = true;  // nothing else is sent
    const double rows = 22.0 * setup.heads, others = setup.world - 1, dim = setup.dim_v;
    setup.combine = DcpCombine::kAllToAll;
    EXPECT_EQ(sent_by_a_layer(setup), others * rows * (4 * dim + 4));
    for (const DcpCombine combine : {DcpCombine::kAllGatherReduceScatter, DcpCombine::kAllToAll}) {
      setup.combine = combine;
      setup.partial = dtype;
      EXPECT_EQ(sent_by_a_layer(setup), others * rows * (2 * dim + 4)) << to_string(combine);
    }
    setup.combine = DcpCombine::kAllGatherReduceScatter;
    setup.all_heads_out = true;
    EXPECT_EQ(sent_by_a_layer(setup), 2 * others * rows * (2 * dim + 4)) << "to its rank, and from there to all";
  }
}

// Nothing travels: there is nothing to save.
TEST(DcpAttention, OneRankRoundsNoPartialResults) {
  DcpSetup setup = small_setup();
  setup.world = 1;
  setup.model = setup.cache = DType::kBFloat16;
  DcpCase wide(setup);
  setup.partial = DType::kBFloat16;
  DcpCase narrow(setup);
  wide.run_in_threads();
  narrow.run_in_threads();
  EXPECT_EQ(narrow.ranks[0].out, wide.ranks[0].out);
  EXPECT_EQ(narrow.ranks[0].lse, wide.ranks[0].lse);
}

TEST(DcpAttention, PlansThePassesThatABatchNeeds) {
  DcpSetup setup = small_setup();
  auto groups = make_thread_groups(2, {std::chrono::seconds(40)});
  const auto plan_of = [&](const DcpSetup& changed) {
    const DcpCase whole(changed);
    DcpAttention attention(context(), *groups[0], whole.config());
    return attention.plan(whole.batch());
  };
  const DcpPlan both = plan_of(setup);
  EXPECT_TRUE(both.cached && both.fresh);
  setup.num_cached = 3;
  const DcpPlan decodes = plan_of(setup);
  EXPECT_TRUE(decodes.cached && !decodes.fresh);
  setup.sinks = true;
  EXPECT_TRUE(plan_of(setup).fresh) << "sinks are added there";
  setup = small_setup();
  setup.requests = {{17, 17}, {1, 1}};
  const DcpPlan prompts = plan_of(setup);
  EXPECT_TRUE(!prompts.cached && prompts.fresh) << "nothing is in the cache: nothing needs to be sent";
}

TEST(DcpAttention, LeavesTheBatchAsItIs) {  // the originals localised the engine's lengths in place
  DcpCase whole(small_setup());
  const std::vector<int32_t> seq_lens = whole.seq_lens, cu_q = whole.cu_q;
  whole.run_in_threads();
  EXPECT_EQ(whole.seq_lens, seq_lens);
  EXPECT_EQ(whole.cu_q, cu_q);
}

TEST(DcpAttention, RefusesConfigurations) {
  auto groups = make_thread_groups(2, {std::chrono::seconds(40)});
  const auto refused = [&](ErrorCode code, const char* text, auto change) {
    DcpConfig config = DcpCase(small_setup()).config();
    change(config);
    expect_error(code, text, [&] { DcpAttention(context(), *groups[0], config); });
  };
  refused(ErrorCode::kInvalidArgument, "interleave is 0", [](DcpConfig& c) { c.interleave = 0; });
  refused(ErrorCode::kUnsupported, "kCausal and kNone", [](DcpConfig& c) { c.attention.mask = MaskKind::kCustom; });
  refused(ErrorCode::kUnsupported, "kRopeLlama",
          [](DcpConfig& c) { c.attention.features = Features(Feature::kRopeLlama); });
  refused(ErrorCode::kInvalidArgument, "combine is 7", [](DcpConfig& c) { c.combine = static_cast<DcpCombine>(7); });
  refused(ErrorCode::kInvalidArgument, "transport is 3",
          [](DcpConfig& c) { c.transport = static_cast<DcpTransport>(3); });
  refused(ErrorCode::kUnsupported, "transport is peer, which is for GPUs",
          [](DcpConfig& c) { c.transport = DcpTransport::kPeer; });
  refused(ErrorCode::kInvalidArgument, "partial_dtype is bfloat16 and out float32; partial results are float32, or as",
          [](DcpConfig& c) { c.partial_dtype = DType::kBFloat16; });
  refused(ErrorCode::kInvalidArgument, "partial_dtype is bfloat16 and out float16",
          [](DcpConfig& c) { c.attention.out = DType::kFloat16, c.partial_dtype = DType::kBFloat16; });
  refused(ErrorCode::kInvalidArgument, "partial_dtype is fp8_e4m3 and out fp8_e4m3",
          [](DcpConfig& c) { c.attention.out = c.partial_dtype = DType::kFloat8E4M3; });
  refused(ErrorCode::kInvalidArgument, "force_kernel is", [](DcpConfig& c) { c.force_kernel = "none such"; });
  refused(ErrorCode::kInvalidArgument, "all_heads_out is set with replicated_queries false",
          [](DcpConfig& c) { c.all_heads_out = true; });
  refused(ErrorCode::kInvalidArgument, "all_heads_out is set with combine a2a",
          [](DcpConfig& c) { c.all_heads_out = c.replicated_queries = true, c.combine = DcpCombine::kAllToAll; });
}

TEST(DcpAttention, BoundsRefuseLargerBatchesAndOtherRanksBounds) {
  DcpConfig config = DcpCase(small_setup()).config();
  config.bounds = GraphBounds{3, 30, 17, 70, 0};
  const std::vector<int32_t> cu_q{0, 1, 5}, seq_lens{70, 64}, longer{71, 64};
  run_ranks(2, [&](ProcessGroup& group) {
    DcpAttention attention(context(), group, config);
    EXPECT_TRUE(attention.plan({2, cu_q.data(), seq_lens.data(), 0}).cached);
    expect_error(ErrorCode::kInvalidArgument, "request 0: seq_lens is 71; the bounds allow 70", [&] {
      attention.plan({2, cu_q.data(), longer.data(), 0});
    });
    DcpBatch batch{2, cu_q.data(), seq_lens.data(), 0};
    batch.num_tokens = 6;
    expect_error(ErrorCode::kInvalidArgument, "num_tokens is 6; with lengths on the host it is 0 or",
                 [&] { attention.plan(batch); });
    batch.where = Where::kDevice;
    expect_error(ErrorCode::kInvalidArgument, "a CPU's lengths lie on the host", [&] { attention.plan(batch); });
    EXPECT_NO_THROW(attention.check());
    DcpConfig other = config;
    other.bounds->max_kv_len += group.rank();
    expect_error(ErrorCode::kInvalidArgument, "of the group has another configuration than rank",
                 [&] { DcpAttention(context(), group, other); });
    if (group.rank() == 1) other.interleave = 0;
    expect_error(ErrorCode::kInvalidArgument,
                 group.rank() == 1 ? "interleave is 0" : "rank 1 of the group could not prepare",
                 [&] { DcpAttention(context(), group, other); });
    other.bounds->max_shared_levels = 1;
    expect_error(ErrorCode::kInvalidArgument, group.rank() == 1 ? "interleave is 0" : "bounds.max_shared_levels is 1",
                 [&] { DcpAttention(context(), group, other); });
  });
}

TEST(DcpAttention, RefusesBatches) {
  auto groups = make_thread_groups(2, {std::chrono::seconds(40)});
  DcpAttention attention(context(), *groups[0], DcpCase(small_setup()).config());
  const std::vector<int32_t> cu_q{0, 2, 3}, seq_lens{1, 4}, descending{0, 2, 1};
  expect_error(ErrorCode::kInvalidArgument, "request 0: seq_lens is 1; it has 2 new tokens", [&] {
    attention.plan({2, cu_q.data(), seq_lens.data(), 0});
  });
  expect_error(ErrorCode::kInvalidArgument, "request 1: cu_q descends", [&] {
    attention.plan({2, descending.data(), cu_q.data() + 1, 0});
  });
  expect_error(ErrorCode::kInvalidArgument, "num_cached is 3; it must be from 0 to 2", [&] {
    attention.plan({2, cu_q.data(), cu_q.data() + 1, 3});
  });
  expect_error(ErrorCode::kInvalidArgument, "cu_q is null", [&] { attention.plan({2, nullptr, seq_lens.data(), 0}); });
  expect_error(ErrorCode::kInvalidArgument, "cross_attention is set with a num_cached of 1; an encoder's keys lie",
               [&] {
                 attention.plan({2, cu_q.data(), seq_lens.data(), 1, false, true});
               });
  const std::vector<int32_t> negative{4, -1};
  expect_error(ErrorCode::kInvalidArgument, "request 1: seq_lens is -1; it has 1 queries", [&] {
    attention.plan({2, cu_q.data(), negative.data(), 2, false, true});
  });
  DcpConfig invariant = DcpCase(small_setup()).config();
  invariant.attention.determinism = Determinism::kScheduleInvariant;
  DcpAttention strict(context(), *groups[0], invariant);
  expect_error(ErrorCode::kInvalidArgument, "kScheduleInvariant needs every request's keys read from the cache", [&] {
    strict.plan({2, cu_q.data(), cu_q.data() + 1, 1});
  });
}

// One rank alone: if anything were sent, it would wait for the other.
TEST(DcpAttention, RefusesArgumentsBeforeAnythingIsSentOrWritten) {
  auto groups = make_thread_groups(2, {std::chrono::seconds(40)});
  DcpCase whole(small_setup());
  DcpAttention attention(context(), *groups[0], whole.config());
  const DcpPlan plan = attention.plan(whole.batch());
  core::AlignedBuffer workspace(attention.workspace_size(plan), core::AlignedBuffer::kWorkspaceAlignment);
  const Workspace memory{workspace.data(), workspace.bytes()};
  const auto refused = [&](const char* text, auto change) {
    DcpArgs args = whole.args(0);
    const std::vector<std::byte> before = whole.ranks[0].out;
    change(args);
    expect_error(ErrorCode::kInvalidArgument, text, [&] { attention.run(plan, args, memory); });
    EXPECT_EQ(whole.ranks[0].out, before);
  };
  refused("q has 3 tokens; the plan has 22", [](DcpArgs& a) { a.q.shape[0] = 3; });
  refused("q is [", [](DcpArgs& a) { a.q.shape[1] = 8; });
  refused("out is bfloat16", [](DcpArgs& a) { a.out.dtype = DType::kBFloat16; });
  refused("ragged.k", [](DcpArgs& a) { a.k.shape[1] = 1; });
  refused("page_size 16", [](DcpArgs& a) { a.cache.page_size = 16; });
  refused("the table has 1 rows", [](DcpArgs& a) { a.table.num_rows = 1; });
  refused("alibi_slopes is given", [&](DcpArgs& a) { a.alibi_slopes = whole.ranks[0].slopes.data(); });
  refused("sinks is given", [&](DcpArgs& a) { a.sinks = whole.ranks[0].sinks.data(); });
  refused("logits_soft_cap is given", [](DcpArgs& a) { a.logits_soft_cap = 1.0f; });
  refused("q_scale is given", [](DcpArgs& a) { a.q_scale.value = 2.0f; });
  const DcpArgs args = whole.args(0);
  expect_error(ErrorCode::kWorkspaceTooSmall, "the plan needs", [&] {
    attention.run(plan, args, {workspace.data(), workspace.bytes() - 1});
  });
  expect_error(ErrorCode::kInvalidArgument, "256", [&] {
    attention.run(plan, args, {workspace.data() + 4, workspace.bytes()});
  });
  attention.plan(whole.batch());
  expect_error(ErrorCode::kStalePlan, "", [&] { attention.run(plan, args, memory); });
}

TEST(DcpAttention, LayersInTwoSteps) {
  for (const int32_t world : {1, 2}) {
    DcpSetup setup = small_setup();
    setup.world = world;
    DcpCase whole(setup);
    run_ranks(world, [&](ProcessGroup& group) {
      DcpAttention attention(context(), group, whole.config());
      const DcpPlan plan = attention.plan(whole.batch());
      core::AlignedBuffer workspace(attention.workspace_size(plan), core::AlignedBuffer::kWorkspaceAlignment);
      const Workspace memory{workspace.data(), workspace.bytes()};
      const auto unfinished = [](auto call) {
        expect_error(ErrorCode::kInvalidArgument, "a layer was started and is not finished", call);
      };
      const auto not_started = [&] {
        expect_error(ErrorCode::kInvalidArgument, "no layer was started", [&] { attention.finish(); });
      };
      not_started();
      DcpArgs args = whole.args(group.rank());
      const TensorView out = args.out;
      args.out.shape[0] = 1;
      expect_error(ErrorCode::kInvalidArgument, "out has 1 tokens", [&] { attention.start(plan, args, memory); });
      not_started();
      args.out = out;
      attention.start(plan, args, memory);
      unfinished([&] { attention.start(plan, args, memory); });
      unfinished([&] { attention.run(plan, args, memory); });
      unfinished([&] { attention.plan(whole.batch()); });
      attention.finish();
      not_started();
      group.barrier();
    });
    EXPECT_EQ(whole.wrong_outputs(), "") << world;
  }
}

TEST(DcpTransport, HasNames) {
  for (const DcpTransport transport : {DcpTransport::kAuto, DcpTransport::kGroup, DcpTransport::kPeer}) {
    EXPECT_EQ(dcp_transport_from_name(to_string(transport)), transport);
  }
  EXPECT_EQ(to_string(DcpTransport::kAuto), "auto");
  expect_error(ErrorCode::kInvalidArgument, "transport is 'nvls'; 'auto', 'group' and 'peer' are offered",
               [] { dcp_transport_from_name("nvls"); });
}

TEST(PeerMemory, PlacesOfHeadsAndNamesOfMissingRanks) {
  using namespace kernels::cuda;
  constexpr int32_t kRanks = 3, kHeads = 8, kGroups = 2;
  for (int32_t place = 0; place < kRanks * kHeads; ++place) {
    const HeadOwner owner = head_owner(place, kRanks, kHeads, kGroups);
    EXPECT_EQ(head_place(owner, kRanks, kHeads, kGroups), place);
  }
  for (const int32_t missing : {0, kMostPeers - 1}) {
    for (const int32_t reporter : {0, kMostPeers - 1}) {
      const PeerFault fault = PeerFault::of(missing, reporter);
      EXPECT_NE(fault.word, 0u) << "0 is no fault";
      EXPECT_EQ(fault.missing(), missing);
      EXPECT_EQ(fault.reporter(), reporter);
    }
  }
}

TEST(DcpAttention, RanksOfDifferentBatchesAllThrow) {
  DcpSetup other = small_setup();
  other.requests[1].seq_len = 71;
  run_ranks(2, [&](ProcessGroup& group) {
    DcpCase whole(group.rank() == 0 ? small_setup() : other);
    expect_error(ErrorCode::kInvalidArgument, "runs another batch or configuration than rank",
                 [&] { whole.run(group, context()); });
    DcpSetup window = small_setup();
    window.window_left = group.rank() == 0 ? -1 : 5;
    DcpCase windowed(window);
    expect_error(ErrorCode::kInvalidArgument, "runs another batch or configuration",
                 [&] { windowed.run(group, context()); });
    DcpConfig otherwise = windowed.config();
    otherwise.attention.window_left = -1;
    if (group.rank() == 0) otherwise.transport = DcpTransport::kGroup;
    DcpAttention transported(context(), group, otherwise);
    expect_error(ErrorCode::kInvalidArgument, "runs another batch or configuration",
                 [&] { windowed.run(transported); });
    DcpSetup halved = small_setup();
    halved.model = halved.cache = DType::kBFloat16;
    if (group.rank() == 1) halved.partial = DType::kBFloat16;
    DcpCase rounded(halved);
    expect_error(ErrorCode::kInvalidArgument, "runs another batch or configuration",
                 [&] { rounded.run(group, context()); });
    DcpSetup encoder = small_setup();
    encoder.mask = MaskKind::kNone;
    encoder.num_cached = 3;
    encoder.cross = group.rank() == 0;
    DcpCase crossing(encoder);
    expect_error(ErrorCode::kInvalidArgument, "runs another batch or configuration",
                 [&] { crossing.run(group, context()); });
  });
}

// Each rank attends with the queries of all, by what it has itself.
TEST(DcpAttention, RanksOfDifferentScalesAllThrow) {
  DcpSetup setup = small_setup();
  setup.model = DType::kBFloat16;
  setup.cache = setup.query = DType::kFloat8E4M3;
  setup.num_cached = 3;
  setup.soft_cap = 2.0f;
  const auto refused = [&](const char* text, const DcpSetup& of_one, auto change) {
    run_ranks(2, [&](ProcessGroup& group) {
      DcpCase whole(group.rank() == 0 ? setup : of_one);
      DcpAttention attention(context(), group, whole.config());
      const DcpPlan plan = attention.plan(whole.batch());
      core::AlignedBuffer workspace(attention.workspace_size(plan), core::AlignedBuffer::kWorkspaceAlignment);
      DcpArgs args = whole.args(group.rank());
      if (group.rank() == 1) change(args);
      const std::vector<std::byte> before = whole.ranks[static_cast<size_t>(group.rank())].out;
      expect_error(ErrorCode::kInvalidArgument, text, [&] {
        attention.run(plan, args, {workspace.data(), workspace.bytes()});
      });
      EXPECT_EQ(whole.ranks[static_cast<size_t>(group.rank())].out, before);
    });
  };
  const auto same = [](DcpArgs&) {};
  refused("sm_scale is ", setup, [](DcpArgs& a) { a.sm_scale = 0.5f; });
  refused("logits_soft_cap is ", setup, [](DcpArgs& a) { a.logits_soft_cap = 1.0f; });
  refused("q_scale is ", setup, [](DcpArgs& a) { a.q_scale.value = 3.0f; });
  setup.q_granularity = ScaleGranularity::kPerHead;
  setup.q_scales = {0.5f, 2.0f};
  DcpSetup other = setup;
  other.q_scales[0] = 0.25f;
  refused("q_scale is ", other, same);
  other.q_scales = {0.5f, 3.0f};
  refused("behind the first, which is 0.5 on both", other, same);
  setup.q_granularity = other.q_granularity = ScaleGranularity::kPerRequest;
  setup.q_scales = {0.5f, 2.0f, 1.0f};
  other.q_scales = {0.5f, 2.0f, 4.0f};
  refused("behind the first", other, same);
  setup.q_granularity = other.q_granularity = ScaleGranularity::kPerRequestAndHead;
  setup.q_scales = {0.5f, 2.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  other.q_scales = {0.5f, 2.0f, 1.0f, 1.0f, 1.0f, 0.5f};
  refused("behind the first", other, same);
}

TEST(DcpAttention, ADefaultScaleIsAsGoodAsItsValue) {
  DcpSetup setup = small_setup();
  run_ranks(2, [&](ProcessGroup& group) {
    DcpCase whole(setup);
    DcpAttention attention(context(), group, whole.config());
    const DcpPlan plan = attention.plan(whole.batch());
    core::AlignedBuffer workspace(attention.workspace_size(plan), core::AlignedBuffer::kWorkspaceAlignment);
    DcpArgs args = whole.args(group.rank());
    if (group.rank() == 1) args.sm_scale = 1.0f / std::sqrt(static_cast<float>(setup.dim_qk));
    attention.run(plan, args, {workspace.data(), workspace.bytes()});
    EXPECT_EQ(whole.wrong_output(group.rank()), "");
  });
}

TEST(DcpAttention, ARankThatCannotRunEndsTheOthers) {
  expect_error(ErrorCode::kInvalidArgument, "interleave is 0", [] {
    run_ranks(2, [](ProcessGroup& group) {
      DcpSetup setup = small_setup();
      DcpCase whole(setup);
      if (group.rank() == 1) {
        DcpConfig config = whole.config();
        config.interleave = 0;
        DcpAttention(context(), group, config);
      }
      whole.run(group, context());
    });
  });
}

// A NaN in a request's own keys stays visible, whichever rank has it, and reaches no other request.
TEST(DcpAttention, NanReachesItsRequestOnly) {
  for (const DcpCombine combine : {DcpCombine::kAllGatherReduceScatter, DcpCombine::kAllToAll}) {
    DcpSetup setup = small_setup();
    setup.combine = combine;
    DcpCase whole(setup);
    DcpCase::Rank& poisoned = whole.ranks[1];
    const int32_t page = poisoned.table[static_cast<size_t>(poisoned.columns)];  // request 1's first
    const auto page_bytes = static_cast<size_t>(setup.page_size * setup.kv_heads * setup.dim_qk) * sizeof(float);
    store_from_float(poisoned.cache.data() + static_cast<size_t>(page) * page_bytes, DType::kFloat32, 0, NAN);
    whole.run_in_threads();
    for (const DcpCase::Rank& rank : whole.ranks) {
      for (int32_t token = 0; token < whole.tokens(); ++token) {
        const bool own = token >= whole.cu_q[1] && token < whole.cu_q[2];
        // The poisoned key is KV head 0's: the first two q heads read it.
        for (int32_t head = 0; head < setup.heads; ++head) {
          const auto row = static_cast<size_t>(token * setup.heads + head);
          EXPECT_EQ(std::isnan(rank.lse[row]), own && head < 2) << "token " << token << ", head " << head;
          const float value = load_as_float(rank.out.data(), DType::kFloat32, static_cast<int64_t>(row) * setup.dim_v);
          EXPECT_EQ(std::isnan(value), own && head < 2) << "token " << token << ", head " << head;
        }
      }
    }
  }
}

// The originals plan the new tokens' pass, and the first one, without what batch invariance needs.
TEST(DcpAttention, BatchInvariantRowsKeepTheirBits) {
  DcpSetup float32 = small_setup(), bfloat16 = small_setup();
  bfloat16.model = bfloat16.cache = bfloat16.partial = DType::kBFloat16;
  for (DcpSetup setup : {float32, bfloat16}) {
    for (const DcpCombine combine : {DcpCombine::kAllGatherReduceScatter, DcpCombine::kAllToAll}) {
      for (const int32_t num_cached : {0, 1}) {
        setup.combine = combine;
        setup.num_cached = num_cached;
        setup.sinks = setup.alibi = true;
        setup.interleave = 2;
        setup.determinism = Determinism::kBatchInvariant;
        setup.requests = {{300, 9}};
        DcpCase alone(setup);
        setup.requests = {{300, 9}, {1000, 33}, {1, 1}, {77, 20}};
        DcpCase among(setup);
        alone.run_in_threads();
        among.run_in_threads();
        const auto bytes = static_cast<std::ptrdiff_t>(9 * setup.heads * setup.dim_v * size_of(setup.model));
        for (size_t r = 0; r < 2; ++r) {
          const DcpCase::Rank &a = alone.ranks[r], &b = among.ranks[r];
          EXPECT_TRUE(std::equal(a.out.begin(), a.out.begin() + bytes, b.out.begin())) << to_string(combine);
          EXPECT_TRUE(std::equal(a.lse.begin(), a.lse.begin() + 9 * setup.heads, b.lse.begin())) << to_string(combine);
        }
      }
    }
  }
}

}  // namespace
}  // namespace folio::distributed::testing
