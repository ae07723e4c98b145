// Cascades of an op on a GPU: found in tables on the host, read by kernels in the GPU's memory, and for graphs always
// of one form. On the emulated GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "folio/folio.hpp"
#include "folio/types/float_convert.hpp"

namespace folio {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kHeadDim = 64;
constexpr int32_t kPageSize = 16;
constexpr int32_t kQHeads = 8;
constexpr int32_t kColumns = 24;
constexpr int32_t kRequests = 6;
constexpr int32_t kPages = kRequests * kColumns;

AttentionConfig config() {
  AttentionConfig config;
  config.num_q_heads = kQHeads;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = kHeadDim;
  config.page_size = kPageSize;
  config.out = DType::kFloat32;
  return config;
}

AttentionOp make_op(bool for_graphs, Determinism determinism = Determinism::kRunToRun) {
  PrepareOptions options;
  if (for_graphs) {
    options.bounds = GraphBounds{
        .max_requests = kRequests, .max_tokens = 24, .max_q_len = 8, .max_kv_len = 500, .max_shared_levels = 3};
  }
  AttentionConfig wanted = config();
  wanted.determinism = determinism;
  return prepare(Context::cuda(0), wanted, options);
}

/// Requests whose tables begin alike: `common` pages of all, and behind them `more` of all but the first two.
struct Step {
  Step(std::vector<int32_t> q_lens, std::vector<int32_t> kv_lens, int32_t common, int32_t more)
      : kv_len(std::move(kv_lens)), table(size_t{kRequests} * kColumns) {
    for (const int32_t q_len : q_lens) cu_q.push_back(cu_q.back() + q_len);
    for (int32_t r = 0; r < kRequests; ++r) {
      for (int32_t column = 0; column < kColumns; ++column) {
        int32_t owner = column < common ? 0 : r;
        if (r > 2 && column >= common && column < common + more) owner = 2;
        table[static_cast<size_t>(r * kColumns + column)] = kPages - 1 - (owner * kColumns + column);
      }
    }
    on_gpu = table;
  }

  CascadeBatch batch(bool csr) {
    CascadeBatch batch;
    batch.num_requests = static_cast<int32_t>(kv_len.size());
    batch.cu_q = cu_q.data();
    batch.kv_len = kv_len.data();
    batch.table = dense_table(table, batch.num_requests, kColumns);
    indptr.clear();
    for (int32_t r = 0; r <= batch.num_requests; ++r) indptr.push_back(r * kColumns);
    if (csr) batch.table = csr_table(table, indptr);
    batch.device_indices = on_gpu.data();
    return batch;
  }

  std::vector<int32_t> cu_q{0}, kv_len, table, on_gpu, indptr;
};

std::vector<float> run_with(const AttentionOp& op, const Step& step, const Cascade& cascade) {
  static const auto values = [](int32_t salt) {
    std::vector<uint16_t> all(size_t{kPages} * kPageSize * 2 * kHeadDim);
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] = float_to_bfloat16(static_cast<float>(i * static_cast<size_t>(salt) % 31) * 0.125f - 1.875f);
    }
    return all;
  };
  static std::vector<uint16_t> k = values(7), v = values(5);
  const int32_t tokens = step.cu_q.back();
  std::vector<uint16_t> q(static_cast<size_t>(tokens) * kQHeads * kHeadDim);
  for (size_t i = 0; i < q.size(); ++i) q[i] = float_to_bfloat16(static_cast<float>(i * 3 % 17) * 0.125f - 1.0f);
  std::vector<float> out(q.size(), -99.0f);
  BatchView batch;
  batch.num_requests = static_cast<int32_t>(step.kv_len.size());
  batch.num_tokens = tokens;
  batch.cu_q = step.cu_q.data();
  batch.segments = cascade.segments;
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan made = plan(op, batch, buffer);
  std::vector<SegmentArgs> segments(cascade.tables.size());
  for (size_t s = 0; s < segments.size(); ++s) {
    segments[s].cache = make_nhd_view({kPages, kPageSize, 2, kHeadDim, kHeadDim, DType::kBFloat16}, k.data(), v.data());
    segments[s].table = cascade.tables[s];
  }
  AttentionArgs args;
  args.q = ConstTensorView(q.data(), DType::kBFloat16, {tokens, kQHeads, kHeadDim});
  args.out = TensorView(out.data(), DType::kFloat32, {tokens, kQHeads, kHeadDim});
  args.segments = segments;
  const size_t bytes = workspace_size(made);
  std::vector<unsigned char> memory(bytes + 256, 0xff);
  void* const aligned = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  run(made, args, {aligned, bytes});
  return out;
}

void expect_near(const std::vector<float>& got, const std::vector<float>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 0x1p-8f) << i;
}

std::vector<float> plain(const Step& step) {
  const AttentionOp op = make_op(false);
  CascadePlanner alone(op, 0);
  Step copy = step;
  return run_with(op, copy, alone.discover(copy.batch(false)));
}

Step nested() {
  return {{1, 1, 3, 1, 1, 1}, {300, 290, 340, 380, 375, 351}, 12, 6};
}

TEST(CascadesOnAGpu, AreFoundOnTheHostAndReadThere) {
  const AttentionOp op = make_op(false);
  for (const bool csr : {false, true}) {
    for (const bool discovers : {false, true}) {
      Step step = nested();
      const std::vector<float> expected = plain(step);
      CascadePlanner planner(op);
      const Cascade& cascade =
          discovers ? planner.discover(step.batch(csr)) : planner.share(step.batch(csr), 12 * kPageSize);
      EXPECT_EQ(cascade.num_levels(), discovers ? 2 : 1);
      EXPECT_EQ(static_cast<int32_t>(cascade.segments.size()), cascade.num_levels() + 1);
      // Kernels see neither of the host's arrays.
      std::fill(step.table.begin(), step.table.end(), INT32_MAX);
      std::fill(step.indptr.begin(), step.indptr.end(), INT32_MAX);
      expect_near(run_with(op, step, cascade), expected);
    }
  }
}

TEST(CascadesOnAGpu, WithoutAnythingSharedTheTableIsTheBatchs) {
  const AttentionOp op = make_op(false);
  for (const bool csr : {false, true}) {
    Step step({1, 2}, {40, 70}, 0, 0);
    const std::vector<float> expected = plain(step);
    CascadePlanner planner(op);
    const Cascade& cascade = planner.discover(step.batch(csr));
    ASSERT_EQ(cascade.segments.size(), 1u);
    EXPECT_EQ(cascade.tables[0].indices, step.on_gpu.data());
    std::fill(step.table.begin(), step.table.end(), INT32_MAX);
    std::fill(step.indptr.begin(), step.indptr.end(), INT32_MAX);
    EXPECT_EQ(run_with(op, step, cascade), expected);
  }
}

/// What a graph keeps: as many segments, and the addresses of their tables.
TEST(CascadesOnAGpu, HaveOneFormForGraphs) {
  const AttentionOp op = make_op(true);
  CascadePlanner planner(op);
  ASSERT_EQ(planner.max_levels(), 3);
  std::vector<const int32_t*> captured;
  const auto expect_form = [&](Step step, int32_t levels, const std::function<const Cascade&(CascadeBatch)>& ask) {
    const std::vector<float> expected = plain(step);
    const Cascade& cascade = ask(step.batch(levels % 2 == 0));
    EXPECT_EQ(cascade.num_levels(), levels);
    ASSERT_EQ(cascade.segments.size(), 4u);
    std::vector<const int32_t*> starts;
    for (const PageTableView& table : cascade.tables) starts.push_back(table.indptr);
    if (captured.empty()) captured = starts;
    EXPECT_EQ(starts, captured);
    std::fill(step.table.begin(), step.table.end(), INT32_MAX);
    expect_near(run_with(op, step, cascade), expected);
  };
  const auto discover = [&](const CascadeBatch& batch) -> const Cascade& { return planner.discover(batch); };
  const auto share = [&](const CascadeBatch& batch) -> const Cascade& { return planner.share(batch, 12 * kPageSize); };
  expect_form(Step({1, 2}, {40, 70}, 0, 0), 0, discover);
  expect_form(nested(), 2, discover);
  expect_form(nested(), 1, share);
  expect_form(Step({1, 0, 1}, {300, 0, 290}, 0, 0), 0, discover);
  expect_form(Step({}, {}, 0, 0), 0, discover);
}

TEST(CascadesOnAGpu, InvariantLevelsHaveOneSegment) {
  const AttentionOp op = make_op(true, Determinism::kBatchInvariant);
  Step step = nested();
  CascadePlanner planner(op);
  EXPECT_EQ(planner.discover(step.batch(false)).segments.size(), 1u);
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(CascadesOnAGpu, RefuseWhatKernelsCouldNotRead) {
  CascadePlanner planner(make_op(true));
  Step step = nested();
  CascadeBatch batch = step.batch(false);
  batch.device_indices = nullptr;
  EXPECT_THAT(refusal([&] { planner.discover(batch); }), HasSubstr("device_indices is null"));
  batch = step.batch(false);
  batch.table.row_stride = 0;  // one row for all
  EXPECT_THAT(refusal([&] { planner.discover(batch); }), HasSubstr("as those of captured graphs must"));
  std::vector<int32_t> cu_q(kRequests + 2), kv_len(kRequests + 1);
  batch = step.batch(false);
  batch.num_requests = kRequests + 1;
  batch.cu_q = cu_q.data();
  batch.kv_len = kv_len.data();
  EXPECT_THAT(refusal([&] { planner.discover(batch); }),
              HasSubstr("num_requests is 7; the op was prepared for at most 6"));
  CascadePlanner on_cpu(prepare(Context::cpu(), config()));
  EXPECT_THAT(refusal([&] { on_cpu.discover(step.batch(false)); }), HasSubstr("are for planners of an op on a GPU"));
  EXPECT_EQ(CascadePlanner(make_op(false), kMaxCascadeLevels).max_levels(), 7) << "kernels take eight segments";
}

}  // namespace
}  // namespace folio
