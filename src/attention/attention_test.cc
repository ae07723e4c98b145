#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "attention/attention_test_util.hpp"
#include "core/allocation_test_util.hpp"
#include "core/error_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

using ::testing::HasSubstr;

TEST(Prepare, NamesTheKernelItChose) {
  const SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  bool listed = false;
  for (const KernelAnswer& answer : explain(small.context, small.config)) {
    listed |= answer.name == op.kernel_name() && answer.available && answer.refusal.empty();
  }
  EXPECT_TRUE(listed) << op.kernel_name();
}

TEST(Prepare, ResolvesDefaultDtypes) {
  SmallDecode small;
  small.config.q = DType::kBFloat16;
  small.config.kv = DType::kFloat8E4M3;
  EXPECT_EQ(prepare(small.context, small.config).config().out, DType::kBFloat16);
  EXPECT_EQ(prepare(small.context, small.config).config().ragged_kv, DType::kBFloat16);
  small.config.q = DType::kFloat8E4M3;
  EXPECT_EQ(prepare(small.context, small.config).config().out, DType::kBFloat16);
}

TEST(Prepare, ForcedKernelsRunOrFail) {
  const SmallDecode small;
  EXPECT_EQ(
      prepare(small.context, small.config, {.bounds = {}, .force_kernel = "generic", .num_workers = 0}).kernel_name(),
      "generic");
  EXPECT_THAT(folio::testing::message_of([&] {
                prepare(small.context, small.config, {.bounds = {}, .force_kernel = "fast", .num_workers = 0});
              }),
              HasSubstr("\"fast\"; kernels here are: "));
}

TEST(Prepare, RefusesWhatNoKernelTakes) {
  SmallDecode small;
  small.config.head_dim_qk = 100;
  EXPECT_THAT(folio::testing::message_of([&] { prepare(small.context, small.config); }, ErrorCode::kUnsupported),
              HasSubstr("head_dim_qk is 100"));
}

TEST(Prepare, UnknownPackedPages_AreRefused) {
  SmallDecode small;
  small.config.kv_format = KvFormat::kCpuPacked;
  small.config.q = small.config.kv = DType::kBFloat16;
  EXPECT_THAT(folio::testing::message_of([&] { prepare(small.context, small.config); }, ErrorCode::kUnsupported),
              HasSubstr("packed pages of 8 tokens in bfloat16"));
  small.config.page_size = 16;
  EXPECT_NO_THROW(prepare(small.context, small.config));
  small.config.kv = DType::kFloat32;
  EXPECT_THAT(folio::testing::message_of([&] { prepare(small.context, small.config); }, ErrorCode::kUnsupported),
              HasSubstr("float32"));
}

TEST(Prepare, RefusesNonsense) {
  const auto message = [](const std::function<void(AttentionConfig&)>& change) {
    SmallDecode small;
    change(small.config);
    return folio::testing::message_of([&] { prepare(small.context, small.config); });
  };
  EXPECT_THAT(message([](AttentionConfig& c) { c.num_q_heads = 5; }), HasSubstr("no multiple of num_kv_heads (2)"));
  EXPECT_THAT(message([](AttentionConfig& c) { c.num_kv_heads = 0; }), HasSubstr("num_kv_heads is 0"));
  EXPECT_THAT(message([](AttentionConfig& c) { c.page_size = 0; }), HasSubstr("page_size is 0"));
  EXPECT_THAT(message([](AttentionConfig& c) { c.window_left = -2; }), HasSubstr("window_left is -2"));
  EXPECT_THAT(message([](AttentionConfig& c) { c.q = static_cast<DType>(77); }), HasSubstr("77"));
  EXPECT_THAT(message([](AttentionConfig& c) { c.mask = static_cast<MaskKind>(9); }), HasSubstr("mask is 9"));
  EXPECT_THAT(message([](AttentionConfig& c) { c.features.bits = 1u << 20; }), HasSubstr("unknown bits"));
}

TEST(Plan, GoesStaleWhenItsBufferIsPlannedAgain) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan first = plan(op, small.batch, buffer);
  const AttentionPlan second = plan(op, small.batch, buffer);
  const Workspace workspace = small.workspace(workspace_size(op));
  EXPECT_THAT(folio::testing::message_of([&] { run(first, small.args, workspace); }, ErrorCode::kStalePlan),
              HasSubstr("plan"));
  EXPECT_NO_THROW(run(second, small.args, workspace));
}

TEST(Plan, KnowsItsOp) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan first = plan(op, small.batch, buffer);
  plan(op, small.batch, buffer);
  EXPECT_EQ(first.op().shared_state(), op.shared_state());  // stale or not
}

TEST(Plan, FailedPlanLeavesNoPlan) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan first = plan(op, small.batch, buffer);
  small.kv_len[1] = -3;
  EXPECT_THAT(folio::testing::message_of([&] { plan(op, small.batch, buffer); }), HasSubstr("-3"));
  EXPECT_THAT(folio::testing::message_of([&] { summary(first); }, ErrorCode::kStalePlan), HasSubstr("plan"));
}

TEST(Plan, RefusesAnotherOpsBuffer) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  const AttentionOp other = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(other);
  EXPECT_THAT(folio::testing::message_of([&] { plan(op, small.batch, buffer); }), HasSubstr("another op"));
}

TEST(Plan, SummaryCountsReadsOncePerKvHead) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const PlanSummary counts = summary(plan(op, small.batch, buffer));
  EXPECT_EQ(counts.kv_tokens_read, 2 * (5 + 20));
  EXPECT_EQ(counts.qk_pairs, 2 * 2 * (5 + 20));
}

TEST(Run, RefusesWrongArguments) {
  const auto message = [](const std::function<void(SmallDecode&)>& change) {
    SmallDecode small;
    const AttentionOp op = prepare(small.context, small.config);
    PlanBuffer buffer = make_plan_buffer(op);
    const AttentionPlan plan = folio::plan(op, small.batch, buffer);
    const Workspace workspace = small.workspace(workspace_size(op));
    change(small);
    const std::string text = folio::testing::message_of([&] { run(plan, small.args, workspace); });
    for (float value : small.out) EXPECT_EQ(value, -1.0f) << "an output was written";
    for (float value : small.lse) EXPECT_EQ(value, -1.0f) << "an LSE was written";
    return text;
  };
  EXPECT_THAT(message([](SmallDecode& s) { s.args.q.dtype = DType::kFloat16; }), HasSubstr("q is float16"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.q.shape[0] = 3; }),
              HasSubstr("q is [3, 4, 16]; it must be [2, 4, 16]"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.q.strides[2] = 2; }), HasSubstr("innermost"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.q.data = nullptr; }), HasSubstr("q.data is null"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.out.strides[0] = 8; }), HasSubstr("out's rows overlap"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.out.data = s.q.data(); }), HasSubstr("out overlaps q"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.lse.head_stride = 0; }), HasSubstr("lse's rows overlap"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.sm_scale = std::numeric_limits<float>::infinity(); }),
              HasSubstr("sm_scale"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.logits_soft_cap = 30.0f; }), HasSubstr("Feature::kSoftCap"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.sinks = s.q.data(); }), HasSubstr("Feature::kSinks"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.alibi_slopes = s.q.data(); }), HasSubstr("Feature::kAlibi"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.rope.theta = 5e5f; }), HasSubstr("Feature::kRopeLlama"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.rope.theta = 0.0f; }), HasSubstr("rope.theta is 0"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.rope.scale = -1.0f; }), HasSubstr("rope.scale is -1"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.q_scale.value = 2.0f; }), HasSubstr("q is not fp8"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.out_scale.value = 2.0f; }), HasSubstr("out is not fp8"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.out_block_scale.data = s.q.data(); }), HasSubstr("out_block_scale"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.custom_mask = reinterpret_cast<const uint8_t*>(s.q.data()); }),
              HasSubstr("kCustom"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.segments = {}; }), HasSubstr("0 segments; the plan has 1"));
  EXPECT_THAT(message([](SmallDecode& s) { s.segment_args[0].k_scale.granularity = ScaleGranularity::kPerHead; }),
              HasSubstr("segment 0: k_scale is per head or request, but has no data"));
  EXPECT_THAT(message([](SmallDecode& s) { s.segment_args[0].cache.page_size = 16; }), HasSubstr("segment 0"));
  EXPECT_THAT(message([](SmallDecode& s) { s.segment_args[0].table.num_rows = 1; }),
              HasSubstr("1 rows; the plan has 2"));
  EXPECT_THAT(message([](SmallDecode& s) { s.indptr[2] = 3; }), HasSubstr("its length needs 3"));
  EXPECT_THAT(message([](SmallDecode& s) { s.indptr[1] = 9; }), HasSubstr("table.indptr of row 0"));
  EXPECT_THAT(message([](SmallDecode& s) { s.segment_args[0].ragged.indptr = s.indptr.data(); }),
              HasSubstr("has it paged"));
  EXPECT_THAT(message([](SmallDecode& s) {
                s.indices.resize(8);
                s.segment_args[0].table = dense_table(s.indices, 2, 2);
              }),
              HasSubstr("a row has 2"));
}

TEST(Run, RefusesASmallOrCrookedWorkspace) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan plan = folio::plan(op, small.batch, buffer);
  Workspace workspace = small.workspace(workspace_size(op) + 256);
  Workspace crooked{static_cast<std::byte*>(workspace.data) + 64, workspace.bytes - 64};
  EXPECT_THAT(folio::testing::message_of([&] { run(plan, small.args, crooked); }), HasSubstr("aligned to 256"));
  workspace.bytes = workspace_size(plan) - 1;
  EXPECT_THAT(folio::testing::message_of([&] { run(plan, small.args, workspace); }, ErrorCode::kWorkspaceTooSmall),
              HasSubstr("are needed"));
  EXPECT_LE(workspace_size(plan), workspace_size(op));
}

TEST(Run, ValidateFindsPageIdsOutOfRange) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan plan = folio::plan(op, small.batch, buffer);
  EXPECT_NO_THROW(validate(plan, small.args));
  small.indices[2] = 4;
  EXPECT_THAT(folio::testing::message_of([&] { validate(plan, small.args); }), HasSubstr("4"));
}

TEST(Run, WarmStepsAllocateNothing) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const Workspace workspace = small.workspace(workspace_size(op));
  run(plan(op, small.batch, buffer), small.args, workspace);
  const int64_t before = folio::testing::num_allocations();
  run(plan(op, small.batch, buffer), small.args, workspace);
  EXPECT_EQ(folio::testing::num_allocations(), before);
}

TEST(Run, UniformKeysGiveTheMeanOfTheValues) {
  SmallDecode small;
  small.k.assign(small.k.size(), 0.0f);
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  run(plan(op, small.batch, buffer), small.args, small.workspace(workspace_size(op)));
  EXPECT_NEAR(small.lse[0], std::log(5.0), 1e-6);
  EXPECT_NEAR(small.lse[7], std::log(20.0), 1e-6);
  double mean = 0;  // request 0: page 3, tokens 0..4, head 0, component 0
  for (size_t t = 0; t < 5; ++t) mean += small.v[3 * 8 * 2 * 16 + t * 2 * 16] / 5.0;
  EXPECT_NEAR(small.out[0], mean, 1e-6);
}

}  // namespace
}  // namespace folio::inline v0::attention
