#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attention/attention_test_util.hpp"
#include "core/allocation_test_util.hpp"
#include "core/error_test_util.hpp"
#include "folio/reference.hpp"
#include "folio/types/float_convert.hpp"

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

TEST(Prepare, MostSplits_BelowZeroOrWhereTheyAreFixed_AreRefused) {
  SmallDecode small;
  PrepareOptions options;
  options.max_kv_splits = -1;
  EXPECT_THAT(folio::testing::message_of([&] { prepare(small.context, small.config, options); }),
              HasSubstr("max_kv_splits is -1"));
  options.max_kv_splits = 4;
  EXPECT_NO_THROW(prepare(small.context, small.config, options));
  small.config.determinism = Determinism::kBatchInvariant;
  EXPECT_THAT(folio::testing::message_of([&] { prepare(small.context, small.config, options); }),
              HasSubstr("max_kv_splits is 4 at a determinism whose splits are fixed"));
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

TEST(Plan, OfABufferThatStoodThereBefore_SaysSo) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  plan(op, small.batch, buffer);
  const AttentionPlan other(&buffer.state(), 5);
  EXPECT_THAT(folio::testing::message_of([&] { summary(other); }, ErrorCode::kStalePlan),
              HasSubstr("number 5 of its buffer, which has made 1 so far"));
}

TEST(Plan, RefusedBeforeItBegins_KeepsTheLastPlan) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config);
  const AttentionOp other = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan first = plan(op, small.batch, buffer);
  EXPECT_THAT(folio::testing::message_of([&] { plan(other, small.batch, buffer); }), HasSubstr("another op"));
  EXPECT_THAT(folio::testing::message_of([&] { plan(op, small.batch, buffer, Stream{&small}); }), HasSubstr("stream"));
  EXPECT_NO_THROW(run(first, small.args, small.workspace(workspace_size(op))));
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
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 4;  // in bytes beyond 64 bits
  EXPECT_THAT(message([](SmallDecode& s) { s.args.q.strides[0] = kHuge; }), HasSubstr("beyond the address space"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.out.strides[0] = kHuge; }), HasSubstr("beyond the address space"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.lse.token_stride = kHuge; }), HasSubstr("beyond the address space"));
  EXPECT_THAT(message([](SmallDecode& s) { s.args.q.strides[0] = -kHuge; }), HasSubstr("beyond the address space"));
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
  EXPECT_THAT(message([](SmallDecode& s) { s.args.custom_mask_bytes = 9; }), HasSubstr("custom_mask_bytes is 9"));
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
  EXPECT_THAT(message([](SmallDecode& s) { s.segment_args[0].table.row_stride = 4; }), HasSubstr("row_stride is 4"));
  EXPECT_THAT(message([](SmallDecode& s) { s.segment_args[0].table.first_column = 1; }), HasSubstr("first_column 1"));
  const auto dense = [](SmallDecode& s, int64_t row_stride) {
    PageTableView& table = s.segment_args[0].table;
    table.kind = PageTableKind::kDense;
    table.indptr = nullptr;
    table.row_stride = row_stride;
  };
  EXPECT_THAT(message([&](SmallDecode& s) { dense(s, std::numeric_limits<int64_t>::max()); }), HasSubstr("overflows"));
  EXPECT_THAT(message([&](SmallDecode& s) {
                dense(s, 3);
                s.segment_args[0].table.indptr = s.indptr.data();
              }),
              HasSubstr("a dense table has none"));
  EXPECT_THAT(message([](SmallDecode& s) { s.segment_args[0].cache.num_pages = 0; }),
              HasSubstr("row 0 has 5 keys, but cache.num_pages is 0"));
}

TEST(Run, ScalesThatMeanNothing_AreRefused) {
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto message = [](const std::function<void(Scale&)>& change) {
    SmallDecode small;
    const AttentionOp op = prepare(small.context, small.config);
    PlanBuffer buffer = make_plan_buffer(op);
    const AttentionPlan plan = folio::plan(op, small.batch, buffer);
    const Workspace workspace = small.workspace(workspace_size(op));
    change(small.segment_args[0].v_scale);
    return folio::testing::message_of([&] { run(plan, small.args, workspace); });
  };
  const auto in_memory = [](Scale& scale, ScaleGranularity granularity, const float* data, int64_t stride = 0) {
    scale.data = data;
    scale.granularity = granularity;
    scale.request_stride = stride;
  };
  for (const float value : {0.0f, -1.0f, kNan, std::numeric_limits<float>::infinity()}) {
    EXPECT_THAT(message([&](Scale& s) { s.value = value; }), HasSubstr("v_scale.value is"));
    const float data[] = {1.0f, 2.0f, 3.0f, value};
    EXPECT_THAT(message([&](Scale& s) { in_memory(s, ScaleGranularity::kPerTensor, data + 3); }),
                HasSubstr("segment 0: v_scale.data[0] is"));
    EXPECT_THAT(message([&](Scale& s) { in_memory(s, ScaleGranularity::kPerHead, data + 2); }), HasSubstr("data[1]"));
    EXPECT_THAT(message([&](Scale& s) { in_memory(s, ScaleGranularity::kPerRequest, data + 2); }),
                HasSubstr("data[1]"));
    EXPECT_THAT(message([&](Scale& s) { in_memory(s, ScaleGranularity::kPerRequestAndHead, data, 2); }),
                HasSubstr("data[3]"));
  }
  const float ones[] = {1.0f, 1.0f};
  EXPECT_THAT(message([](Scale& s) { s.request_stride = 2; }), HasSubstr("v_scale.request_stride is 2, but"));
  EXPECT_THAT(message([&](Scale& s) { in_memory(s, ScaleGranularity::kPerHead, ones, 2); }),
              HasSubstr("v_scale.request_stride is 2, but"));
  EXPECT_THAT(message([&](Scale& s) { in_memory(s, ScaleGranularity::kPerRequestAndHead, ones, -2); }),
              HasSubstr("v_scale.request_stride is -2"));
}

TEST(Run, ScalesOfRequestsWithoutQueries_AreNotRead) {
  SmallDecode small;
  small.cu_q = {0, 0, 2};
  small.kv_len = {0, 20};
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan plan = folio::plan(op, small.batch, buffer);
  const float scales[] = {std::numeric_limits<float>::quiet_NaN(), 2.0f};
  Scale& scale = small.segment_args[0].k_scale;
  scale.data = scales;
  scale.granularity = ScaleGranularity::kPerRequest;
  EXPECT_NO_THROW(run(plan, small.args, small.workspace(workspace_size(op))));
}

TEST(Run, OutputsOverInputsOrEachOther_AreRefused) {
  const auto message = [](const std::function<void(SmallDecode&, Workspace&)>& change) {
    SmallDecode small;
    small.config.features = Feature::kSinks;
    const AttentionOp op = prepare(small.context, small.config, {.bounds = {}, .force_kernel = {}, .num_workers = 2});
    PlanBuffer buffer = make_plan_buffer(op);
    const AttentionPlan plan = folio::plan(op, small.batch, buffer);
    Workspace workspace = small.workspace(workspace_size(op) + 4096);
    for (std::vector<int32_t>* ints : {&small.indices, &small.indptr}) ints->resize(1024);  // with room for an output
    small.lse.resize(1024);
    small.args.lse.data = small.lse.data();
    small.segment_args[0].table = csr_table(small.indices, small.indptr);
    change(small, workspace);
    return folio::testing::message_of([&] { run(plan, small.args, workspace); });
  };
  const auto out_over = [&](const std::function<const void*(SmallDecode&)>& where) {
    return message([&](SmallDecode& s, Workspace&) { s.args.out.data = const_cast<void*>(where(s)); });
  };
  EXPECT_THAT(out_over([](SmallDecode& s) { return s.k.data() + 8; }),
              HasSubstr("segment 0: out overlaps the K cache"));
  EXPECT_THAT(out_over([](SmallDecode& s) { return s.v.data() + 3 * 256; }), HasSubstr("out overlaps the V cache"));
  EXPECT_THAT(out_over([](SmallDecode& s) { return s.lse.data(); }), HasSubstr("out overlaps lse"));
  EXPECT_THAT(out_over([](SmallDecode& s) { return s.indices.data(); }), HasSubstr("out overlaps table.indices"));
  EXPECT_THAT(out_over([](SmallDecode& s) { return s.indptr.data(); }), HasSubstr("out overlaps table.indptr"));
  EXPECT_THAT(out_over([](SmallDecode& s) { return static_cast<std::byte*>(s.memory.data()) + 256; }),
              HasSubstr("out overlaps the workspace"));
  const auto lse_over = [&](const std::function<float*(SmallDecode&)>& where) {
    return message([&](SmallDecode& s, Workspace&) { s.args.lse.data = where(s); });
  };
  EXPECT_THAT(lse_over([](SmallDecode& s) { return s.q.data(); }), HasSubstr("lse overlaps q"));
  EXPECT_THAT(lse_over([](SmallDecode& s) { return s.v.data() + 77; }), HasSubstr("lse overlaps the V cache"));
  EXPECT_THAT(lse_over([](SmallDecode& s) { return s.out.data() + 5; }), HasSubstr("out overlaps lse"));
  EXPECT_THAT(message([](SmallDecode& s, Workspace&) { s.args.sinks = s.lse.data() + 1; }),
              HasSubstr("lse overlaps sinks"));
  EXPECT_THAT(message([](SmallDecode& s, Workspace& w) { s.args.q.data = static_cast<std::byte*>(w.data) + 64; }),
              HasSubstr("the workspace overlaps q"));
  EXPECT_THAT(message([](SmallDecode& s, Workspace&) {
                s.out.assign(s.out.size(), 1.0f);  // a scale like any other
                s.segment_args[0].k_scale.data = s.out.data() + 2;
              }),
              HasSubstr("segment 0: out overlaps k_scale.data"));
}

/// q, out and LSE may be columns of one buffer.
TEST(Run, OutputsBetweenInputs_AreTaken) {
  SmallDecode plain;
  SmallDecode fused;
  constexpr int64_t kRow = 16 + 16 + 1;
  std::vector<float> buffer(2 * 4 * kRow, 0.5f);
  for (int64_t* strides : {fused.args.q.strides.data(), fused.args.out.strides.data()}) {
    strides[0] = 4 * kRow;
    strides[1] = kRow;
  }
  fused.args.q.data = buffer.data();
  fused.args.out.data = buffer.data() + 16;
  fused.args.lse = {buffer.data() + 32, 4 * kRow, kRow, LseBase::kE};
  for (SmallDecode* small : {&plain, &fused}) {
    const AttentionOp op = prepare(small->context, small->config);
    PlanBuffer plans = make_plan_buffer(op);
    run(plan(op, small->batch, plans), small->args, small->workspace(workspace_size(op)));
  }
  for (size_t row = 0; row < 8; ++row) {
    EXPECT_EQ(buffer[row * kRow + 32], plain.lse[row]);
    for (size_t d = 0; d < 16; ++d) EXPECT_EQ(buffer[row * kRow + 16 + d], plain.out[row * 16 + d]) << row << ", " << d;
  }
}

/// One row of the output against the float64 oracle: 24 keys or fewer, float32 sums.
void expect_rows(const SmallDecode& small, const AttentionConfig& config, const BatchView& batch,
                 const AttentionArgs& args, double tolerance) {
  std::array<double, 16> row{};
  for (int32_t token = 0; token < 2; ++token) {
    for (int32_t head = 0; head < 4; ++head) {
      const double lse = verify::reference_row(config, batch, args, token, head, row);
      const auto at = static_cast<size_t>(token * 4 + head);
      EXPECT_NEAR(small.lse[at], lse, tolerance) << token << ", " << head;
      for (size_t d = 0; d < 16; ++d) EXPECT_NEAR(small.out[at * 16 + d], row[d], tolerance) << token << ", " << head;
    }
  }
}

/// A prefix and the rest of the keys, nothing said of positions: as one segment of all keys.
TEST(Run, FirstPosLeftOut_SegmentsFollowEachOther) {
  for (const bool shared : {false, true}) {
    const std::array<float, 4> slopes{0.5f, 0.25f, 0.125f, 1.0f};
    SmallDecode whole;
    SmallDecode small;
    for (SmallDecode* one : {&whole, &small}) {
      one->config.window_left = 14;
      one->config.features = Feature::kAlibi;
      one->args.alibi_slopes = slopes.data();
      one->cu_q = {0, 0, 2};
      one->kv_len = {0, 20};
    }
    const std::vector<int32_t> prefix_len = shared ? std::vector<int32_t>{16} : std::vector<int32_t>{0, 16};
    const std::vector<int32_t> own_len{0, 4}, groups{0, 2};
    const std::vector<int32_t> prefix_indptr = shared ? std::vector<int32_t>{1, 3} : std::vector<int32_t>{1, 1, 3};
    const std::vector<int32_t> own_indptr{3, 3, 4};
    std::array<KvSegment, 2> segments;
    segments[0].kv_len = prefix_len.data();
    segments[0].group_indptr = shared ? groups.data() : nullptr;
    segments[0].num_groups = shared ? 1 : 0;
    segments[1].kv_len = own_len.data();
    std::array<SegmentArgs, 2> segment_args{small.segment_args[0], small.segment_args[0]};
    segment_args[0].table = csr_table(small.indices, prefix_indptr);
    segment_args[1].table = csr_table(small.indices, own_indptr);
    small.batch.segments = segments;
    small.args.segments = segment_args;
    const AttentionOp op = prepare(small.context, small.config);
    PlanBuffer buffer = make_plan_buffer(op);
    const AttentionPlan plan = folio::plan(op, small.batch, buffer);
    run(plan, small.args, small.workspace(workspace_size(plan)));
    expect_rows(small, small.config, whole.batch, whole.args, 1e-5);  // the definition
    expect_rows(small, small.config, small.batch, small.args, 1e-5);  // the oracle's own default
  }
}

TEST(Run, E5m2Queries_AreTaken) {
  SmallDecode small;
  small.config.q = DType::kFloat8E5M2;
  small.config.out = DType::kFloat32;
  std::vector<uint8_t> stored(small.q.size());
  for (size_t i = 0; i < stored.size(); ++i) {
    stored[i] = float_to_fp8_e5m2(static_cast<float>(i % 9) * 0.375f - 1.5f);
  }
  small.args.q = ConstTensorView(stored.data(), DType::kFloat8E5M2, {2, 4, 16});
  small.args.q_scale.value = 0.5f;
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  run(plan(op, small.batch, buffer), small.args, small.workspace(workspace_size(op)));
  expect_rows(small, small.config, small.batch, small.args, 1e-5);
}

TEST(InitWorkspace, MemoryForOnePlan_IsEnough) {
  SmallDecode small;
  const AttentionOp op = prepare(small.context, small.config, {.bounds = {}, .force_kernel = {}, .num_workers = 4});
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan plan = folio::plan(op, small.batch, buffer);
  ASSERT_LT(workspace_size(plan), workspace_size(op));
  const Workspace workspace = small.workspace(workspace_size(plan));
  EXPECT_NO_THROW(init_workspace(op, workspace));
  EXPECT_NO_THROW(run(plan, small.args, workspace));
  EXPECT_THAT(folio::testing::message_of(
                  [&] {
                    init_workspace(op, {workspace.data, 0});
                  },
                  ErrorCode::kWorkspaceTooSmall),
              HasSubstr("are needed"));
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
