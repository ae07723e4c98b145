#include <cmath>
#include <random>

#include "device_array.hpp"
#include "folio/types/float_convert.hpp"

/// Scales that are legal and rare: kernels that take the largest score for the largest logit must not be misled.
namespace folio::cuda_test {
namespace {

constexpr int32_t kQHeads = 4;
constexpr int32_t kHeadDim = 128;
constexpr int32_t kPageSize = 16;
constexpr int32_t kTokens = 70;  ///< more rows than one row tile of any kernel
constexpr int32_t kKeys = 150;
constexpr int32_t kPages = (kKeys + kPageSize - 1) / kPageSize;

std::vector<uint16_t> normals(std::mt19937& random, size_t count) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = float_to_bfloat16(normal(random));
  return values;
}

/// One causal request of 4 query heads over one KV head, prefilled behind a prefix.
class Prefill {
 public:
  explicit Prefill(const char* kernel) : op_(make_op(kernel)), buffer_(make_plan_buffer(op_)) {
    std::mt19937 random(5);
    queries = normals(random, size_t{kTokens} * kQHeads * kHeadDim);
    keys_.set(normals(random, size_t{kPages} * kPageSize * kHeadDim));
    values = normals(random, size_t{kPages} * kPageSize * kHeadDim);
    values_.set(values);
    std::vector<int32_t> pages(kPages);
    for (int32_t i = 0; i < kPages; ++i) pages[static_cast<size_t>(i)] = i;
    pages_.set(pages);
    indptr_.set({0, kPages});
  }

  std::vector<uint16_t> run(const std::vector<uint16_t>& q, float sm_scale, float k_scale) {
    q_.set(q);
    out_.fill(0xff);
    const KvCacheShape shape{.num_pages = kPages,
                             .page_size = kPageSize,
                             .num_kv_heads = 1,
                             .head_dim_qk = kHeadDim,
                             .head_dim_v = kHeadDim,
                             .dtype = DType::kBFloat16};
    SegmentArgs segment;
    segment.cache = make_nhd_view(shape, keys_.data(), values_.data());
    segment.table = {.kind = PageTableKind::kCsr,
                     .indices = pages_.data(),
                     .num_indices = kPages,
                     .indptr = indptr_.data(),
                     .row_stride = 0,
                     .first_column = 0,
                     .num_rows = 1};
    // In device memory: there `run` cannot refuse what no engine means.
    const DeviceArray<float> scale(std::vector<float>{k_scale});
    segment.k_scale.data = scale.data();
    AttentionArgs args;
    args.q = ConstTensorView(q_.data(), DType::kBFloat16, {kTokens, kQHeads, kHeadDim});
    args.out = TensorView(out_.data(), DType::kBFloat16, {kTokens, kQHeads, kHeadDim});
    args.segments = {&segment, 1};
    args.sm_scale = sm_scale;
    const int32_t cu_q[] = {0, kTokens};
    const int32_t kv_len[] = {kKeys};
    KvSegment lengths;
    lengths.kv_len = kv_len;
    BatchView batch;
    batch.num_requests = 1;
    batch.num_tokens = kTokens;
    batch.cu_q = cu_q;
    batch.segments = {&lengths, 1};
    const TestStream stream;
    const AttentionPlan plan = folio::plan(op_, batch, buffer_, stream.get());
    const size_t bytes = std::max(workspace_size(op_), workspace_size(plan));
    const DeviceArray<std::byte> workspace(bytes);
    init_workspace(op_, {workspace.data(), bytes}, stream.get());
    folio::run(plan, args, {workspace.data(), bytes}, stream.get());
    stream.wait();
    return out_.get();
  }

  std::vector<uint16_t> queries;
  std::vector<uint16_t> values;

 private:
  static AttentionOp make_op(const char* kernel) {
    AttentionConfig config;
    config.num_q_heads = kQHeads;
    config.num_kv_heads = 1;
    config.head_dim_qk = config.head_dim_v = kHeadDim;
    config.page_size = kPageSize;
    PrepareOptions options;
    options.force_kernel = kernel;
    return prepare(Context::cuda(0), config, options);
  }

  AttentionOp op_;
  PlanBuffer buffer_;
  DeviceArray<uint16_t> q_{size_t{kTokens} * kQHeads * kHeadDim};
  DeviceArray<uint16_t> out_{size_t{kTokens} * kQHeads * kHeadDim};
  DeviceArray<uint16_t> keys_{size_t{kPages} * kPageSize * kHeadDim};
  DeviceArray<uint16_t> values_{size_t{kPages} * kPageSize * kHeadDim};
  DeviceArray<int32_t> pages_{kPages};
  DeviceArray<int32_t> indptr_{2};
};

TEST_F(CudaTest, ANegativeScaleIsThatOfNegativeQueries) {
  Prefill prefill("cuda-sm80");
  std::vector<uint16_t> negative = prefill.queries;
  for (uint16_t& value : negative) value ^= 0x8000u;
  const std::vector<uint16_t> out = prefill.run(prefill.queries, -0.2f, 1.0f);
  const std::vector<uint16_t> expected = prefill.run(negative, 0.2f, 1.0f);
  for (size_t i = 0; i < out.size(); ++i) {
    const float value = bfloat16_to_float(expected[i]);
    ASSERT_NEAR(bfloat16_to_float(out[i]), value, 0.004f + 0.01f * std::abs(value)) << i;
  }
  EXPECT_EQ(prefill.run(prefill.queries, -0.2f, -1.0f), prefill.run(prefill.queries, 0.2f, 1.0f));
}

TEST_F(CudaTest, AScaleOfZeroGivesTheMeanOfTheValues) {
  Prefill prefill("cuda-sm80");
  const std::vector<uint16_t> out = prefill.run(prefill.queries, 0.2f, 0.0f);
  for (int32_t d = 0; d < kHeadDim; ++d) {
    double sum = 0.0;
    for (int32_t key = 0; key < kKeys; ++key) {
      sum += bfloat16_to_float(prefill.values[static_cast<size_t>(key) * kHeadDim + static_cast<size_t>(d)]);
      const int32_t token = key - (kKeys - kTokens);
      if (token < 0) continue;
      for (int32_t head = 0; head < kQHeads; ++head) {
        const auto row = static_cast<size_t>(token) * kQHeads + static_cast<size_t>(head);
        const size_t at = row * kHeadDim + static_cast<size_t>(d);
        ASSERT_NEAR(bfloat16_to_float(out[at]), sum / (key + 1), 0.004) << token << ", " << head << ", " << d;
      }
    }
  }
}

}  // namespace
}  // namespace folio::cuda_test
