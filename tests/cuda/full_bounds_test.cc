#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>

#include "device_array.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

/// Batches that fill the bounds of their op to the last request, token and key: nothing of the plan's memory is spare.
namespace folio::cuda_test {
namespace {

/// 64 prompts of different lengths over shuffled pages, with a table in CSR form.
class Prompts {
 public:
  static constexpr int32_t kRequests = 64;  // more than a warp divides by itself
  static constexpr int32_t kHeads = 8;
  static constexpr int32_t kKvHeads = 2;
  static constexpr int32_t kDim = 128;
  static constexpr int32_t kPageSize = 16;
#if defined(FOLIO_EMULATED_CUDA)
  static constexpr int32_t kShortest = 43;
  static constexpr int32_t kStep = 1;
#else
  static constexpr int32_t kShortest = 690;
  static constexpr int32_t kStep = 10;
#endif

  Prompts() {
    for (int32_t r = 0; r < kRequests; ++r) {
      lengths.push_back(kShortest + r * kStep);
      cu_q.push_back(cu_q.back() + lengths.back());
      indptr.push_back(indptr.back() + (lengths.back() + kPageSize - 1) / kPageSize);
    }
    std::mt19937 random(61);
    std::vector<int32_t> pages(static_cast<size_t>(indptr.back()));
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
    std::shuffle(pages.begin(), pages.end(), random);
    device_lengths = std::make_unique<DeviceArray<int32_t>>(lengths);
    device_cu_q = std::make_unique<DeviceArray<int32_t>>(cu_q);
    device_indptr = std::make_unique<DeviceArray<int32_t>>(indptr);
    ids = std::make_unique<DeviceArray<int32_t>>(pages);
    q = noise(int64_t{cu_q.back()} * kHeads * kDim, random);
    for (auto* const half : {&k, &v}) *half = noise(int64_t{indptr.back()} * kPageSize * kKvHeads * kDim, random);
  }

  GraphBounds bounds() const {
    return {.max_requests = kRequests,
            .max_tokens = cu_q.back(),
            .max_q_len = lengths.back(),
            .max_kv_len = lengths.back(),
            .max_shared_levels = 0};
  }

  AttentionPlan plan(const AttentionOp& op, bool on_device, PlanBuffer& buffer, Stream stream) const {
    KvSegment segment;
    segment.kv_len = on_device ? device_lengths->data() : lengths.data();
    BatchView batch;
    batch.where = on_device ? Where::kDevice : Where::kHost;
    batch.num_requests = kRequests;
    batch.num_tokens = cu_q.back();
    batch.max_q_len = batch.max_kv_len = lengths.back();
    batch.cu_q = on_device ? device_cu_q->data() : cu_q.data();
    batch.segments = {&segment, 1};
    return folio::plan(op, batch, buffer, stream);
  }

  void run(const AttentionPlan& plan, uint16_t* out, Workspace workspace, Stream stream) const {
    SegmentArgs segment;
    segment.cache.dtype = DType::kBFloat16;
    segment.cache.k = k->data();
    segment.cache.v = v->data();
    segment.cache.num_pages = indptr.back();
    segment.cache.page_size = kPageSize;
    segment.cache.num_kv_heads = kKvHeads;
    segment.cache.head_dim_qk = segment.cache.head_dim_v = kDim;
    segment.cache.k_strides = segment.cache.v_strides = {kPageSize * kKvHeads * kDim, kKvHeads * kDim, kDim};
    segment.table.indices = ids->data();
    segment.table.num_indices = indptr.back();
    segment.table.indptr = device_indptr->data();
    segment.table.num_rows = kRequests;
    AttentionArgs args;
    args.q = ConstTensorView(q->data(), DType::kBFloat16, {cu_q.back(), kHeads, kDim});
    args.out = TensorView(out, DType::kBFloat16, {cu_q.back(), kHeads, kDim});
    args.segments = {&segment, 1};
    folio::run(plan, args, workspace, stream);
  }

  std::vector<int32_t> lengths;
  std::vector<int32_t> cu_q{0};
  std::vector<int32_t> indptr{0};
  std::unique_ptr<DeviceArray<int32_t>> device_lengths, device_cu_q, device_indptr, ids;
  std::unique_ptr<DeviceArray<uint16_t>> q, k, v;

 private:
  /// bfloat16 of magnitude 1 to 2.
  static std::unique_ptr<DeviceArray<uint16_t>> noise(int64_t count, std::mt19937& random) {
    std::vector<uint16_t> values(static_cast<size_t>(count));
    for (uint16_t& value : values) value = static_cast<uint16_t>(0x3f80u + random() % 128 + ((random() & 1u) << 15));
    return std::make_unique<DeviceArray<uint16_t>>(values);
  }
};

TEST_F(CudaTest, PromptsThatFillTheBounds_GiveTheHostPlansOutput) {
  const Prompts prompts;
  AttentionConfig config;
  config.num_q_heads = Prompts::kHeads;
  config.num_kv_heads = Prompts::kKvHeads;
  config.head_dim_qk = config.head_dim_v = Prompts::kDim;
  config.page_size = Prompts::kPageSize;
  const TestStream stream;
  const auto elements = static_cast<size_t>(prompts.cu_q.back()) * Prompts::kHeads * Prompts::kDim;
  DeviceArray<uint16_t> out(elements);
  std::vector<uint16_t> expected;
  for (const bool on_device : {false, true}) {
    PrepareOptions options;
    if (on_device) options.bounds = prompts.bounds();
    const AttentionOp op = prepare(Context::cuda(0), config, options);
    PlanBuffer buffer = make_plan_buffer(op);
    const size_t bytes = workspace_size(op);
    const DeviceArray<std::byte> memory(bytes);
    const Workspace workspace{memory.data(), bytes};
    init_workspace(op, workspace, stream.get());
    out.fill(0xff);
    const AttentionPlan plan = prompts.plan(op, on_device, buffer, stream.get());
    for (int layer = 0; layer < 2; ++layer) prompts.run(plan, out.data(), workspace, stream.get());
    stream.wait();
    if (!on_device) {
      expected = out.get();
      continue;
    }
    EXPECT_TRUE(out.get() == expected);
    const CapturedGraph graph(stream, [&] {
      const AttentionPlan captured = prompts.plan(op, true, buffer, stream.get());
      for (int layer = 0; layer < 4; ++layer) prompts.run(captured, out.data(), workspace, stream.get());
    });
    for (int i = 0; i < repeats(25); ++i) {
      out.fill(0xff);
      graph.launch(stream);
      stream.wait();
    }
    EXPECT_TRUE(out.get() == expected);
    check_plans(buffer);
  }
}

}  // namespace
}  // namespace folio::cuda_test
