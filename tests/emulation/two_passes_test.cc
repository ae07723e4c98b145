// An op of two passes: which pass runs which requests, and that together they compute what one kernel does. The kernels
// of both passes are cuda-sm90-decode, on the emulated GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "emulated_gpu.hpp"
#include "folio/folio.hpp"
#include "folio/sealed_plan.hpp"
#include "folio/types/float_convert.hpp"
#include "kernels/cuda/sm90/decode/launch.hpp"

namespace folio::inline v0 {
namespace {

namespace cuda = kernels::cuda;

constexpr int32_t kHeadDim = 64;
constexpr int32_t kPageSize = 16;
constexpr int32_t kKvHeads = 2;
constexpr int32_t kQHeads = 4;
constexpr const char* kAlone = "cuda-sm90-decode";
constexpr const char* kTwoPasses = "two passes";
constexpr const char* kDoubleRows = "two passes, the decode pass with double-height work tiles";

/// What a launch may write besides outputs, for it runs beside the other's.
struct Owned {
  const float* acc;
  const float* acc_end;
  const float* sum;
  const float* sum_end;
  const uint32_t* counters;
};

/// What has been launched since the last look: "decode 3" for three work tiles.
std::vector<std::string> launched;
std::vector<Owned> owned;
std::vector<int32_t> max_rows;  ///< what launches were told of their work tiles

void note_and_launch(const char* who, const cuda::AttentionParams& params, const cuda::LaunchShape& shape,
                     Stream stream) {
  const scheduler::PlanView& plan = params.plan->view;
  launched.push_back(who + (" " + std::to_string(plan.num_work_tiles)));
  max_rows.push_back(shape.max_rows);
  for (int32_t i = 0; i < plan.num_work_tiles; ++i) {
    EXPECT_LE(plan.work_tiles[i].row_end - plan.work_tiles[i].row_begin, shape.max_rows);
  }
  const int64_t rows = plan.num_partial_rows;
  owned.push_back({params.partial_acc, params.partial_acc + rows * params.head_dim_v, params.partial_row_sum,
                   params.partial_row_sum + rows, params.tile_counters});
  cuda::sm90::decode::kSm90DecodeKernel.launch(params, shape, stream);
}
std::string refusal(const AttentionConfig& config) {
  return cuda::sm90::decode::kSm90DecodeKernel.refusal(config);
}
scheduler::TileShape tile(const AttentionConfig& config) {
  return cuda::sm90::decode::kSm90DecodeKernel.tile(config);
}
DType p_dtype(const AttentionConfig& config) {
  return cuda::sm90::decode::kSm90DecodeKernel.p_dtype(config);
}

cuda::AttentionKernel pass(const char* name, decltype(cuda::AttentionKernel::launch) launch, int32_t double_rows = 0) {
  return {.name = name,
          .min_compute_capability = 90,
          .refusal = refusal,
          .tile = tile,
          .p_dtype = p_dtype,
          .tile_cost = 96,
          .row_cost = 1,
          .start_cost = 48,
          .pass_cost =
              [](const AttentionConfig&) {
                return cuda::PassCost{1.0f, 0.0f};
              },
          .double_rows = double_rows,
          .launch = launch,
          .combine = cuda::sm90::decode::kSm90DecodeKernel.combine};
}
const cuda::AttentionKernel kDecode = pass("decode", [](const auto& params, const auto& shape, Stream stream) {
  note_and_launch("decode", params, shape, stream);
});
const cuda::AttentionKernel kDoubleDecode = pass("decode", kDecode.launch, 16);
cuda::AttentionKernel with_fp8_mma(cuda::AttentionKernel kernel) {
  kernel.fp8_mma = [](const AttentionConfig&) { return true; };
  return kernel;
}
const cuda::AttentionKernel kPrefill =
    with_fp8_mma(pass("prefill", [](const auto& params, const auto& shape, Stream stream) {
      cuda::AttentionParams alone = params;
      alone.other_plan = nullptr;  // all CTAs work: this stand-in is not the prefill kernel
      note_and_launch("prefill", alone, shape, stream);
    }));

template <const cuda::AttentionKernel& Decode>
std::span<const cuda::AttentionKernel* const> passes(const AttentionConfig&) {
  static constexpr std::array<const cuda::AttentionKernel*, 2> kPasses{&kPrefill, &Decode};
  return kPasses;
}
cuda::AttentionKernel op_of(const char* name, decltype(cuda::AttentionKernel::passes) passes) {
  return {.name = name,
          .min_compute_capability = 90,
          .refusal = refusal,
          .tile = tile,
          .p_dtype = p_dtype,
          .passes = passes};
}
const cuda::AttentionKernel kBoth = op_of(kTwoPasses, passes<kDecode>);
const cuda::AttentionKernel kBothDouble = op_of(kDoubleRows, passes<kDoubleDecode>);

struct Asked {
  std::vector<int32_t> q_len;
  std::vector<int32_t> kv_len;
  Determinism determinism = Determinism::kRunToRun;
  std::optional<GraphBounds> bounds = std::nullopt;
  bool on_device = false;
  int32_t shared = 0;    ///< keys that all requests have in common, before their own
  bool sealed = false;   ///< run from a schedule
  int64_t changed = -1;  ///< of which this integer was changed
};

struct Got {
  std::vector<float> out;
  std::vector<float> lse;
  std::vector<std::string> launched;
  PlanSummary summary;
  std::string report;  ///< what the next seal threw
};

class TwoPasses : public ::testing::Test {
 protected:
  void SetUp() override {
    attention::emulation::kernels().push_back(&kBoth);
    attention::emulation::kernels().push_back(&kBothDouble);
  }
  void TearDown() override {
    attention::emulation::kernels().pop_back();
    attention::emulation::kernels().pop_back();
  }

  static Got run_with(const Asked& asked, const char* kernel) {
    AttentionConfig config;
    config.num_q_heads = kQHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim_qk = config.head_dim_v = kHeadDim;
    config.page_size = kPageSize;
    config.out = DType::kFloat32;
    config.determinism = asked.determinism;
    PrepareOptions options;
    options.force_kernel = kernel;
    options.bounds = asked.bounds;
    const AttentionOp op = prepare(Context::cuda(0), config, options);
    EXPECT_EQ(op.kernel_name(), kernel);

    std::vector<int32_t> cu_q{0};
    std::vector<int32_t> indptr{0};
    std::vector<int32_t> first_pos(asked.q_len.size(), asked.shared);
    for (size_t r = 0; r < asked.q_len.size(); ++r) {
      cu_q.push_back(cu_q.back() + asked.q_len[r]);
      indptr.push_back(indptr.back() + (asked.kv_len[r] + kPageSize - 1) / kPageSize);
    }
    const int32_t shared_pages = (asked.shared + kPageSize - 1) / kPageSize;
    const int32_t pages = indptr.back() + shared_pages;
    std::vector<int32_t> ids(static_cast<size_t>(pages));
    for (int32_t i = 0; i < pages; ++i) ids[static_cast<size_t>(i)] = pages - 1 - i;
    const std::vector<int32_t> shared_indptr{indptr.back(), pages};
    std::vector<uint16_t> k(static_cast<size_t>(pages) * kPageSize * kKvHeads * kHeadDim);
    std::vector<uint16_t> v(k.size());
    for (size_t i = 0; i < k.size(); ++i) {
      k[i] = float_to_bfloat16(static_cast<float>(i * 7 % 23) * 0.125f - 1.375f);
      v[i] = float_to_bfloat16(static_cast<float>(i * 5 % 31) * 0.125f - 1.875f);
    }
    const int32_t tokens = cu_q.back();
    const size_t rows = static_cast<size_t>(tokens) * kQHeads;
    std::vector<uint16_t> q(rows * kHeadDim);
    for (size_t i = 0; i < q.size(); ++i) q[i] = float_to_bfloat16(static_cast<float>(i * 3 % 17) * 0.125f - 1.0f);
    Got got;
    got.out.assign(rows * kHeadDim, -99.0f);
    got.lse.assign(rows, -99.0f);

    const std::vector<int32_t> all{0, static_cast<int32_t>(asked.q_len.size())};
    const std::vector<int32_t> shared_len{asked.shared};
    std::vector<KvSegment> segments(asked.shared > 0 ? 2 : 1);
    segments.back().kv_len = asked.kv_len.data();
    segments.back().first_pos = first_pos.data();
    if (asked.shared > 0) {
      segments[0].kv_len = shared_len.data();
      segments[0].group_indptr = all.data();
      segments[0].num_groups = 1;
    }
    BatchView batch;
    batch.where = asked.on_device ? Where::kDevice : Where::kHost;
    batch.num_requests = static_cast<int32_t>(asked.q_len.size());
    batch.num_tokens = tokens;
    batch.cu_q = cu_q.data();
    batch.segments = segments;
    const auto segment_args = [&](const std::vector<int32_t>& row_pages) {
      SegmentArgs segment;
      segment.cache =
          make_nhd_view({pages, kPageSize, kKvHeads, kHeadDim, kHeadDim, DType::kBFloat16}, k.data(), v.data());
      segment.table = csr_table(ids, row_pages);
      return segment;
    };
    std::vector<SegmentArgs> args_of_segments;
    if (asked.shared > 0) args_of_segments.push_back(segment_args(shared_indptr));
    args_of_segments.push_back(segment_args(indptr));
    AttentionArgs args;
    args.q = ConstTensorView(q.data(), DType::kBFloat16, {tokens, kQHeads, kHeadDim});
    args.out = TensorView(got.out.data(), DType::kFloat32, {tokens, kQHeads, kHeadDim});
    args.lse = {got.lse.data(), kQHeads, 1, LseBase::kE};
    args.segments = args_of_segments;
    PlanBuffer buffer = make_plan_buffer(op);
    const AttentionPlan plan = folio::plan(op, batch, buffer);
    if (!asked.on_device) got.summary = summary(plan);
    const size_t bytes = workspace_size(plan);
    EXPECT_LE(bytes, workspace_size(op));
    std::vector<unsigned char> memory(bytes + 256, 0xff);
    void* const aligned = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
    launched.clear();
    owned.clear();
    max_rows.clear();
    if (asked.sealed) {
      run_sealed(asked, op, plan, args, {aligned, bytes}, got);
    } else {
      run(plan, args, {aligned, bytes});
    }
    got.launched = launched;
    return got;
  }

  static void run_sealed(const Asked& asked, const AttentionOp& op, const AttentionPlan& plan,
                         const AttentionArgs& args, Workspace workspace, Got& got) {
    SealedPlan seal(op);
    core::AlignedBuffer memory(static_cast<size_t>(SealedPlan::size(plan)) * sizeof(int32_t), 256);
    const std::span<int32_t> ints(memory.as<int32_t>(), memory.bytes() / sizeof(int32_t));
    if (asked.bounds) {
      EXPECT_LE(static_cast<int64_t>(ints.size()), SealedPlan::max_size(op));
    }
    const std::span<const int32_t> schedule = seal.seal(plan, ints);
    EXPECT_THROW(check_sealed(seal.plan(), schedule.first(schedule.size() - 1), {}), Error);
    EXPECT_THROW(check_sealed(seal.plan(), schedule.subspan(1), {}), Error);
    if (asked.changed >= 0) ints[static_cast<size_t>(asked.changed) % ints.size()] ^= 1 << 7;
    check_sealed(seal.plan(), schedule, {});
    run(seal.plan(), args, workspace);
    try {
      seal.seal(plan, ints);
    } catch (const Error& error) {
      got.report = error.what();
    }
  }

  static void expect_near(const Got& got, const Got& expected) {
    ASSERT_EQ(got.out.size(), expected.out.size());
    for (size_t i = 0; i < got.out.size(); ++i) ASSERT_NEAR(got.out[i], expected.out[i], 0x1p-8f) << i;
    for (size_t i = 0; i < got.lse.size(); ++i) ASSERT_NEAR(got.lse[i], expected.lse[i], 0x1p-12f) << i;
  }

  static std::vector<std::string> who(const Got& got) {
    std::vector<std::string> names;
    for (const std::string& launch : got.launched) names.push_back(launch.substr(0, launch.find(' ')));
    return names;
  }
};

using Names = std::vector<std::string>;

/// Up to four tokens fit a row tile of 8 rows: requests 0, 3 and 5 go to the decode pass.
const Asked kMixed{.q_len = {1, 5, 0, 4, 9, 1}, .kv_len = {900, 40, 0, 30, 700, 1}};

GraphBounds bounds(int32_t max_q_len) {
  return {.max_requests = 6, .max_tokens = 40, .max_q_len = max_q_len, .max_kv_len = 1000, .max_shared_levels = 0};
}

TEST_F(TwoPasses, MixedBatch_EqualsOneKernel) {
  const Got got = run_with(kMixed, kTwoPasses);
  expect_near(got, run_with(kMixed, kAlone));
  EXPECT_EQ(who(got), (Names{"prefill", "decode"}));
}

TEST_F(TwoPasses, PartialsAndCounters_AreApart) {
  for (const bool captured : {false, true}) {
    Asked asked = kMixed;
    if (captured) asked.bounds = bounds(12);
    run_with(asked, kTwoPasses);
    ASSERT_EQ(owned.size(), 2u);
    EXPECT_GT(owned[0].sum_end, owned[0].sum);  // each of the two has cut something
    EXPECT_GT(owned[1].sum_end, owned[1].sum);
    EXPECT_LE(owned[0].acc_end, owned[1].acc);
    EXPECT_LE(owned[1].acc_end, owned[0].sum);
    EXPECT_LE(owned[0].sum_end, owned[1].sum);
    EXPECT_NE(owned[0].counters, owned[1].counters);
  }
}

TEST_F(TwoPasses, BatchInvariant_KeepsBits) {
  Asked asked = kMixed;
  asked.determinism = Determinism::kBatchInvariant;
  const Got got = run_with(asked, kTwoPasses);
  const Got alone = run_with(asked, kAlone);
  EXPECT_EQ(got.out, alone.out);
  EXPECT_EQ(got.lse, alone.lse);
  EXPECT_EQ(who(got), (Names{"prefill", "decode"}));
}

TEST_F(TwoPasses, WithoutBounds_OnlyPassesWithWorkAreLaunched) {
  const Asked decodes{.q_len = {1, 1, 4}, .kv_len = {300, 20, 40}};
  const Got decode = run_with(decodes, kTwoPasses);
  EXPECT_EQ(who(decode), (Names{"decode"}));
  expect_near(decode, run_with(decodes, kAlone));
  const Asked prefills{.q_len = {9, 12}, .kv_len = {300, 20}};
  const Got prefill = run_with(prefills, kTwoPasses);
  EXPECT_EQ(who(prefill), (Names{"prefill"}));
  expect_near(prefill, run_with(prefills, kAlone));
  EXPECT_EQ(who(run_with({.q_len = {0}, .kv_len = {5}}, kTwoPasses)), (Names{"prefill"}));
}

TEST_F(TwoPasses, WithBounds_BothAreLaunched) {
  for (const bool on_device : {false, true}) {
    Asked decodes{.q_len = {1, 1}, .kv_len = {300, 20}};
    decodes.bounds = bounds(12);
    decodes.on_device = on_device;
    const Got got = run_with(decodes, kTwoPasses);
    EXPECT_EQ(who(got), (Names{"prefill", "decode"}));
    EXPECT_EQ(got.launched[0], "prefill 0");
    expect_near(got, run_with(decodes, kAlone));
    Asked mixed = kMixed;
    mixed.bounds = bounds(12);
    mixed.on_device = on_device;
    expect_near(run_with(mixed, kTwoPasses), run_with(mixed, kAlone));
  }
}

TEST_F(TwoPasses, BoundsOfDecodes_DecodePassAlone) {
  Asked decodes{.q_len = {1, 4}, .kv_len = {300, 20}};
  decodes.bounds = bounds(4);
  const Got got = run_with(decodes, kTwoPasses);
  EXPECT_EQ(who(got), (Names{"decode"}));
  expect_near(got, run_with(decodes, kAlone));
}

/// To ask whether a request's rows come of FP8 MMA, one prepares for requests of as many queries.
TEST_F(TwoPasses, Fp8Mma_IsThePrefillPasss) {
  AttentionConfig config;
  config.num_q_heads = kQHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim_qk = config.head_dim_v = kHeadDim;
  const auto fp8_mma = [&config](const char* kernel, std::optional<GraphBounds> bounds, bool allowed = true) {
    PrepareOptions options;
    options.force_kernel = kernel;
    options.bounds = bounds;
    options.allow_fp8_mma = allowed;
    return prepare(Context::cuda(0), config, options).fp8_mma();
  };
  EXPECT_TRUE(fp8_mma(kTwoPasses, std::nullopt));
  EXPECT_FALSE(fp8_mma(kTwoPasses, std::nullopt, false));
  EXPECT_FALSE(fp8_mma(kTwoPasses, bounds(4)));
  EXPECT_TRUE(fp8_mma(kTwoPasses, bounds(5)));
  EXPECT_FALSE(fp8_mma(kDoubleRows, bounds(8)));
  EXPECT_TRUE(fp8_mma(kDoubleRows, bounds(9)));
  EXPECT_FALSE(fp8_mma(kAlone, std::nullopt));
  config.determinism = Determinism::kScheduleInvariant;  // one pass takes all
  EXPECT_TRUE(fp8_mma(kTwoPasses, bounds(1)));
}

/// With groups of two heads, 8 tokens are 16 rows.
const Asked kVerifies{.q_len = {1, 8, 5, 0, 3}, .kv_len = {900, 40, 300, 0, 3}};

TEST_F(TwoPasses, DoubleRows_WhereALaunchKnows_GoToDecodePass) {
  Asked verifies = kVerifies;
  const Got got = run_with(verifies, kDoubleRows);
  EXPECT_EQ(who(got), (Names{"decode"}));
  EXPECT_EQ(max_rows, std::vector<int32_t>{16});
  const Got narrow = run_with(verifies, kTwoPasses);
  EXPECT_EQ(who(narrow), (Names{"prefill", "decode"}));
  expect_near(got, narrow);
  verifies.bounds = bounds(8);  // a graph of such batches
  for (const bool on_device : {false, true}) {
    verifies.on_device = on_device;
    expect_near(run_with(verifies, kDoubleRows), narrow);
    EXPECT_EQ(launched.size(), 1u);
    EXPECT_EQ(max_rows, std::vector<int32_t>{16});
  }
  verifies.on_device = false;
  verifies.bounds = bounds(12);  // of any requests: work tiles of the decode pass have 8 rows
  expect_near(run_with(verifies, kDoubleRows), narrow);
  EXPECT_EQ(launched.size(), 2u);
  EXPECT_EQ(max_rows[1], 8);
}

TEST_F(TwoPasses, BatchInvariant_GraphsHaveEagerStepsPasses) {
  Asked verifies = kVerifies;
  verifies.determinism = Determinism::kBatchInvariant;
  const Got eager = run_with(verifies, kDoubleRows);
  EXPECT_EQ(who(eager), (Names{"prefill", "decode"}));
  for (const int32_t most_tokens : {8, 12}) {
    verifies.bounds = bounds(most_tokens);
    const Got captured = run_with(verifies, kDoubleRows);
    EXPECT_EQ(captured.out, eager.out);
    EXPECT_EQ(captured.lse, eager.lse);
  }
}

TEST_F(TwoPasses, DecodePass_IsToldItsTilesRows) {
  run_with({.q_len = {1, 4}, .kv_len = {300, 20}}, kDoubleRows);
  EXPECT_EQ(max_rows, std::vector<int32_t>{8});
  EXPECT_EQ(who(run_with({.q_len = {9, 1}, .kv_len = {300, 20}}, kDoubleRows)), (Names{"prefill", "decode"}));
  EXPECT_EQ(max_rows[1], 2);
  Asked sealed{.q_len = {1, 8}, .kv_len = {300, 20}};
  sealed.sealed = true;
  run_with(sealed, kDoubleRows);
  EXPECT_EQ(max_rows, std::vector<int32_t>{16});
  run_with({.q_len = {1, 1}, .kv_len = {300, 20}, .shared = 100}, kDoubleRows);
  EXPECT_EQ(max_rows.size(), 1u);
}

TEST_F(TwoPasses, ScheduleInvariant_PrefillPassTakesAll) {
  Asked asked = kMixed;
  asked.determinism = Determinism::kScheduleInvariant;
  const Got got = run_with(asked, kTwoPasses);
  EXPECT_EQ(who(got), (Names{"prefill"}));
  EXPECT_EQ(got.out, run_with(asked, kAlone).out);
}

TEST_F(TwoPasses, SealedPlan_HoldsBothPasses) {
  for (const bool captured : {false, true}) {
    Asked asked = kMixed;
    if (captured) asked.bounds = bounds(12);
    const Got expected = run_with(asked, kTwoPasses);
    asked.sealed = true;
    const Got got = run_with(asked, kTwoPasses);
    EXPECT_EQ(got.report, "");
    EXPECT_EQ(got.launched, expected.launched);
    EXPECT_EQ(got.out, expected.out);
    EXPECT_EQ(got.lse, expected.lse);
  }
}

TEST_F(TwoPasses, SealedPlanChanged_NothingIsComputed) {
  for (const char* kernel : {kTwoPasses, kAlone}) {
    for (const int64_t changed : {0, 66, 400, 900, 1999}) {  // in front, in a header, in the work
      Asked asked = kMixed;
      asked.sealed = true;
      asked.changed = changed;
      const Got got = run_with(asked, kernel);
      EXPECT_NE(got.report.find("checksum does not match"), std::string::npos) << changed;
      EXPECT_TRUE(std::all_of(got.out.begin(), got.out.end(), [](float value) { return value == -99.0f; })) << changed;
      EXPECT_TRUE(std::all_of(got.lse.begin(), got.lse.end(), [](float value) { return value == -99.0f; })) << changed;
    }
  }
}

TEST_F(TwoPasses, SharedSegments_OnePassTakesAll) {
  Asked asked{.q_len = {1, 9, 1}, .kv_len = {30, 40, 20}};
  asked.shared = 100;
  EXPECT_EQ(who(run_with(asked, kTwoPasses)), (Names{"prefill"}));
  asked.q_len[1] = 2;
  const Got got = run_with(asked, kTwoPasses);
  EXPECT_EQ(who(got), (Names{"decode"}));
  expect_near(got, run_with(asked, kAlone));
  asked.determinism = Determinism::kBatchInvariant;  // whatever the others are
  EXPECT_EQ(who(run_with(asked, kTwoPasses)), (Names{"prefill"}));
}

}  // namespace
}  // namespace folio::inline v0
