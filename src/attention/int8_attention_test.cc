// Attention over int8 caches: against the oracle, against float64 over what was written, and what is refused.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "attention/int8_cache_test_util.hpp"
#include "core/expect_refused_test_util.hpp"
#include "folio/reference.hpp"

namespace folio::inline v0::attention {
namespace {

using folio::testing::expect_refused;

/// A decode of one request over a cache, with its arguments.
struct OneDecode {
  static constexpr int32_t kDim = 128, kKeys = 512, kPage = 16, kPages = 32;
  OneDecode(const KvCacheView& cache, DType kv, const std::vector<float>& q) {
    config.num_q_heads = 4;
    config.num_kv_heads = 2;
    config.head_dim_qk = config.head_dim_v = kDim;
    config.q = DType::kFloat32;
    config.kv = kv;
    config.kv_format = cache.format;
    config.page_size = kPage;
    std::iota(indices.begin(), indices.end(), 0);
    lengths[0].kv_len = kv_len.data();
    batch.num_requests = batch.num_tokens = 1;
    batch.cu_q = cu_q.data();
    batch.segments = lengths;
    segments[0].cache = cache;
    segments[0].table = csr_table(indices, indptr);
    args.q = ConstTensorView(q.data(), DType::kFloat32, {1, 4, kDim});
    args.out = TensorView(out.data(), DType::kFloat32, {1, 4, kDim});
    args.segments = segments;
  }
  AttentionOp run(const std::string& kernel = {}) {
    const Context context = Context::cpu();
    PrepareOptions options;
    options.force_kernel = kernel;
    AttentionOp op = prepare(context, config, options);
    PlanBuffer buffer = make_plan_buffer(op);
    const AttentionPlan made = plan(op, batch, buffer);
    core::AlignedBuffer memory(workspace_size(made), core::AlignedBuffer::kWorkspaceAlignment);
    folio::run(made, args, {memory.data(), memory.bytes()});
    return op;
  }
  std::vector<double> oracle(const AttentionConfig& prepared) const {
    std::vector<double> expected(4 * kDim);
    for (int32_t head = 0; head < 4; ++head) {
      verify::reference_row(prepared, batch, args, 0, head,
                            std::span(expected).subspan(static_cast<size_t>(head) * kDim, kDim));
    }
    return expected;
  }

  AttentionConfig config;
  std::vector<int32_t> cu_q{0, 1}, kv_len{kKeys}, indptr{0, kPages};
  std::vector<int32_t> indices = std::vector<int32_t>(kPages);
  std::array<KvSegment, 1> lengths;
  std::array<SegmentArgs, 1> segments;
  BatchView batch;
  AttentionArgs args;
  std::vector<float> out = std::vector<float>(4 * kDim);
};

struct Written {
  Written()
      : k(DType::kFloat32, OneDecode::kKeys, 2, OneDecode::kDim, 0, 21),
        v(DType::kFloat32, OneDecode::kKeys, 2, OneDecode::kDim, 0, 22) {
    for (float& value : q) value = static_cast<float>(normal(random));
    std::iota(slots.begin(), slots.end(), int64_t{0});
  }
  std::mt19937 random{23};
  std::normal_distribution<double> normal;
  Rows k, v;
  std::vector<float> q = std::vector<float>(4 * OneDecode::kDim);
  std::vector<int64_t> slots = std::vector<int64_t>(OneDecode::kKeys);
};

/// Attention over what was written is the oracle's over the stored numbers. Scales of the segment multiply besides.
TEST(Int8Attention, IsAttendedTo) {
  for (const Int8Layout layout : {Int8Layout::kNhd, Int8Layout::kHnd, Int8Layout::kPacked, Int8Layout::kInline}) {
    Written w;
    Int8Pool pool(layout, OneDecode::kPages, OneDecode::kPage, 2, OneDecode::kDim, OneDecode::kDim);
    write_kv_cache(Context::cpu(), write_args(w.k, w.v, w.slots, pool));
    OneDecode decode(pool.view, DType::kInt8, w.q);
    decode.segments[0].k_scale.value = 0.5f;
    decode.segments[0].v_scale.value = 3.0f;
    const AttentionOp op = decode.run();
    EXPECT_EQ(op.config().ragged_kv, DType::kFloat32);
    const std::vector<double> expected = decode.oracle(op.config());
    for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(decode.out[i], expected[i], 1e-4) << i;
  }
}

/// Scales of masked tokens may be anything, also between tokens that are visible.
TEST(Int8Attention, ScalesOfMaskedTokensDoNotMatter) {
  Written w;
  Int8Pool pool(Int8Layout::kHnd, OneDecode::kPages, OneDecode::kPage, 2, OneDecode::kDim, OneDecode::kDim);
  write_kv_cache(Context::cpu(), write_args(w.k, w.v, w.slots, pool));
  OneDecode decode(pool.view, DType::kInt8, w.q);
  decode.config.mask = MaskKind::kCustom;
  std::vector<uint8_t> bits(OneDecode::kKeys / 8);
  for (size_t key = 0; key < OneDecode::kKeys; ++key) {
    if (key % 3 != 1) bits[key / 8] = static_cast<uint8_t>(bits[key / 8] | 1u << key % 8);
  }
  decode.args.custom_mask = bits.data();
  decode.args.custom_mask_bytes = static_cast<int64_t>(bits.size());
  const std::vector<double> expected = decode.oracle(decode.config);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const TokenScales& scales : {pool.view.k_token_scales, pool.view.v_token_scales}) {
      for (int64_t key = 1; key < OneDecode::kKeys; key += 3) {
        for (int64_t head = 0; head < 2; ++head) {
          const KvStrides& s = scales.strides;
          scales.data[key / OneDecode::kPage * s.page + key % OneDecode::kPage * s.token + head * s.head] = bad;
        }
      }
    }
    for (const KernelAnswer& answer : explain(Context::cpu(), decode.config)) {
      if (!answer.refusal.empty()) continue;
      decode.run(answer.name);
      for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(decode.out[i], expected[i], 1e-4) << answer.name;
    }
  }
}

TEST(Int8Attention, PreparesForCachesAlone) {
  AttentionConfig config;
  config.num_q_heads = config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = 64;
  config.q = DType::kBFloat16;
  config.kv = DType::kInt8;
  config.page_size = 16;
  const Context context = Context::cpu();
  EXPECT_NO_THROW(prepare(context, config));
  for (const KernelAnswer& answer : explain(context, config)) {
    EXPECT_EQ(answer.refusal.empty(), answer.available) << answer.name << ": " << answer.refusal;
  }
  const auto refused = [&](const std::string& text, const auto& change) {
    AttentionConfig changed = config;
    change(changed);
    expect_refused(
        text, [&] { prepare(context, changed); }, ErrorCode::kUnsupported);
  };
  refused("q is int8, which is a type of paged caches (kv) alone", [](AttentionConfig& c) { c.q = DType::kInt8; });
  refused("ragged_kv is int8", [](AttentionConfig& c) { c.ragged_kv = DType::kInt8; });
  refused("out is int8", [](AttentionConfig& c) { c.out = DType::kInt8; });

  Written w;
  Int8Pool pool(Int8Layout::kNhd, OneDecode::kPages, OneDecode::kPage, 2, OneDecode::kDim, OneDecode::kDim);
  OneDecode decode(pool.view, DType::kInt8, w.q);
  decode.args.out.data = pool.scales.data();
  expect_refused("out overlaps k_token_scales", [&] { decode.run(); });
}

/// Relative root mean square error of attention over a cache, against float64 over what was written.
double relative_error(Written& w, const KvCacheView& cache, DType dtype, Scale scale = {}) {
  CacheWriteArgs args;
  args.k = w.k.view();
  args.v = w.v.view();
  args.slot_mapping = w.slots.data();
  args.num_slots = static_cast<int64_t>(w.slots.size());
  args.cache = cache;
  args.k_scale = args.v_scale = scale;
  write_kv_cache(Context::cpu(), args);
  OneDecode decode(cache, dtype, w.q);
  decode.segments[0].k_scale = decode.segments[0].v_scale = scale;
  decode.run();
  const KvCacheShape exact_shape{OneDecode::kPages, OneDecode::kPage, 2,
                                 OneDecode::kDim,   OneDecode::kDim,  DType::kFloat32};
  Pool exact(Layout::kNhd, exact_shape, 31);
  args.cache = exact.view();
  args.k_scale = args.v_scale = {};
  write_kv_cache(Context::cpu(), args);
  OneDecode exact_decode(args.cache, DType::kFloat32, w.q);
  const std::vector<double> expected = exact_decode.oracle(exact_decode.config);
  double error = 0.0;
  double size = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (static_cast<double>(decode.out[i]) - expected[i]) * (static_cast<double>(decode.out[i]) - expected[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

/// int8 lies between bfloat16 and e4m3; docs/kernels/generic.md has the figures.
TEST(Int8Attention, ErrsLessThanE4M3) {
  const auto shape = [](DType dtype) {
    return KvCacheShape{OneDecode::kPages, OneDecode::kPage, 2, OneDecode::kDim, OneDecode::kDim, dtype};
  };
  for (const float logits : {1.0f, 3.0f}) {  // their deviation: that of keys is 3
    Written w;
    for (float& value : w.q) value *= logits / 3.0f;
    Int8Pool int8(Int8Layout::kNhd, OneDecode::kPages, OneDecode::kPage, 2, OneDecode::kDim, OneDecode::kDim);
    Pool bfloat16(Layout::kNhd, shape(DType::kBFloat16), 1), e4m3(Layout::kNhd, shape(DType::kFloat8E4M3), 2);
    Scale scale;
    scale.value = 16.0f / 448.0f;  // the largest value is below 16
    const double of_int8 = relative_error(w, int8.view, DType::kInt8);
    const double of_bfloat16 = relative_error(w, bfloat16.view(), DType::kBFloat16);
    const double of_e4m3 = relative_error(w, e4m3.view(), DType::kFloat8E4M3, scale);
    const std::string name = "logits_" + std::to_string(static_cast<int>(logits));
    RecordProperty(name + "_int8", std::to_string(of_int8));
    RecordProperty(name + "_bfloat16", std::to_string(of_bfloat16));
    RecordProperty(name + "_e4m3", std::to_string(of_e4m3));
    EXPECT_LT(2.0 * of_bfloat16, of_int8);
    EXPECT_LT(2.0 * of_int8, of_e4m3);
  }
}

}  // namespace
}  // namespace folio::inline v0::attention
