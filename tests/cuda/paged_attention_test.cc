// PagedAttention over device memory: on its stream, beside prepare, plan and run bit for bit; under capture.
#include "folio/paged_attention.hpp"

#include <random>

#include "core/expect_refused_test_util.hpp"
#include "device_array.hpp"
#include "folio/types/float_convert.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

namespace folio::cuda_test {
namespace {

/// A decode beside a prefill, 300 and 40 keys, in bfloat16.
class PagedBatch {
 public:
  static constexpr int32_t kPages = 24, kPage = 16, kHeads = 8, kKvHeads = 2, kDim = 128;
  static constexpr KvCacheShape kShape{kPages, kPage, kKvHeads, kDim, kDim, DType::kBFloat16};

  PagedBatch() : out_(static_cast<size_t>(tokens()) * kHeads * kDim) {
    std::vector<int32_t> table(2 * kColumns);
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i * 7 % kPages);
    table_.set(table);
  }
  int32_t tokens() const { return cu_q.back(); }
  PagedAttentionArgs args() const {
    PagedAttentionArgs a;
    a.q = ConstTensorView(q_.data(), DType::kBFloat16, {tokens(), kHeads, kDim});
    a.cache = make_nhd_view(kShape, k_.data(), v_.data());
    a.page_table = dense_table({table_.data(), 2 * kColumns}, 2, kColumns);
    a.seq_lens = seq_lens;
    a.cu_q = cu_q;
    a.out = TensorView(out_.data(), DType::kBFloat16, {tokens(), kHeads, kDim});
    return a;
  }
  void clear() { out_.fill(0x5a); }
  std::vector<uint16_t> output() const { return out_.get(); }

  /// What prepare, plan and run write.
  std::vector<uint16_t> by_the_core(const Context& context) {
    clear();
    AttentionConfig config;
    config.num_q_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim_qk = config.head_dim_v = kDim;
    const AttentionOp op = prepare(context, config);
    PlanBuffer buffer = make_plan_buffer(op);
    KvSegment keys;
    keys.kv_len = seq_lens.data();
    BatchView batch;
    batch.num_requests = 2;
    batch.num_tokens = tokens();
    batch.cu_q = cu_q.data();
    batch.segments = {&keys, 1};
    const TestStream stream;
    const AttentionPlan plan = folio::plan(op, batch, buffer, stream.get());
    const DeviceArray<std::byte> memory(std::max<size_t>(workspace_size(plan), 256));
    SegmentArgs pages;
    pages.cache = args().cache;
    pages.table = args().page_table;
    AttentionArgs layer;
    layer.q = args().q;
    layer.out = args().out;
    layer.segments = {&pages, 1};
    const Workspace workspace{memory.data(), memory.bytes()};
    init_workspace(op, workspace, stream.get());
    run(plan, layer, workspace, stream.get());
    stream.wait();
    return output();
  }

  std::vector<int32_t> seq_lens{300, 40}, cu_q{0, 1, 34};

 private:
  static constexpr int32_t kColumns = 20;

  static std::vector<uint16_t> noise(size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> values(count);
    for (size_t i = 0; i < count; ++i) {
      store_from_float(values.data(), DType::kBFloat16, static_cast<int64_t>(i), normal(random));
    }
    return values;
  }
  static constexpr size_t kHalf = size_t{kPages} * kPage * kKvHeads * kDim;
  DeviceArray<uint16_t> k_{noise(kHalf, 1)}, v_{noise(kHalf, 2)}, q_{noise(size_t{34} * kHeads * kDim, 3)};
  DeviceArray<int32_t> table_{2 * kColumns};
  DeviceArray<uint16_t> out_;
};

using PagedAttentionTest = CudaTest;

TEST_F(PagedAttentionTest, RunsOnItsStream) {
  const Context context = Context::cuda(0);
  PagedBatch batch;
  const std::vector<uint16_t> expected = batch.by_the_core(context);
  const TestStream first, second;
  for (const TestStream* stream : {&first, &second}) {
    PagedAttention attention(context, stream->get());
    batch.clear();
    attention(batch.args());
    stream->wait();
    EXPECT_EQ(batch.output(), expected);
    const uint64_t planned = attention.plan().generation();
    batch.clear();
    attention(batch.args());  // the next layer
    stream->wait();
    EXPECT_EQ(batch.output(), expected);
    EXPECT_EQ(attention.plan().generation(), planned);
  }
}

TEST_F(PagedAttentionTest, Capture_IsRefused) {
  const TestStream stream;
  PagedAttention attention(Context::cuda(0), stream.get());
  PagedBatch batch;
  attention(batch.args());  // planned: a graph would keep this plan
  const std::vector<uint16_t> expected = batch.by_the_core(Context::cuda(0));
  batch.clear();
  const CapturedGraph graph(stream, [&] {
    folio::testing::expect_refused(
        "the stream is being captured", [&] { attention(batch.args()); }, ErrorCode::kUnsupported);
  });
  graph.launch(stream);
  stream.wait();
  EXPECT_EQ(batch.output(), std::vector<uint16_t>(expected.size(), 0x5a5a));
  attention(batch.args());
  stream.wait();
  EXPECT_EQ(batch.output(), expected);
}

}  // namespace
}  // namespace folio::cuda_test
