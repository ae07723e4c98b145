#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <vector>

#include "testing/reference_attention.hpp"

/// The oracle against the results of an independent program: tests/golden/attention/make_cases.py.
namespace folio::inline v0::verify {
namespace {

using Arrays = std::map<std::string, std::vector<double>>;

struct GoldenCase {
  std::string name;
  Arrays arrays;
  std::vector<Arrays> segments;
};

std::vector<GoldenCase> read_cases() {
  std::ifstream file(FOLIO_GOLDEN_ATTENTION);
  std::vector<GoldenCase> cases;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key == "case") {
      cases.emplace_back();
      words >> cases.back().name;
      continue;
    }
    size_t count = 0;
    words >> count;
    std::vector<double> values;
    for (std::string word; words >> word;) values.push_back(std::stod(word));
    EXPECT_EQ(values.size(), count) << key;
    if (key == "segment") cases.back().segments.emplace_back();
    const bool of_results = key == "mask" || key == "out" || key == "lse";
    const bool of_case = cases.back().segments.empty() || of_results;
    (of_case ? cases.back().arrays : cases.back().segments.back())[key] = values;
  }
  return cases;
}

std::vector<int32_t> ints(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}
std::vector<float> floats(const std::vector<double>& values) {
  std::vector<float> out;
  for (const double value : values) out.push_back(static_cast<float>(value));
  return out;
}
template <typename T>
const T* data_or_null(const std::vector<T>& values) {
  return values.empty() ? nullptr : values.data();
}

/// A segment of a case, laid out as a ragged segment or as pages of 3 tokens in reverse order.
struct LaidOut {
  std::vector<int32_t> shape, lens, first, groups, indptr{0}, indices;
  std::vector<float> k, v, k_scale, v_scale;
  KvSegment segment;
  SegmentArgs args;

  LaidOut(const Arrays& arrays, const AttentionConfig& config, bool paged)
      : shape(ints(arrays.at("segment"))),
        lens(ints(arrays.at("lens"))),
        first(ints(arrays.at("first"))),
        groups(ints(arrays.at("groups"))),
        k(floats(arrays.at("k"))),
        v(floats(arrays.at("v"))),
        k_scale(floats(arrays.at("k_scale"))),
        v_scale(floats(arrays.at("v_scale"))) {
    segment.kv_len = lens.data();
    segment.first_pos = first.data();
    segment.group_indptr = data_or_null(groups);
    segment.num_groups = groups.empty() ? 0 : static_cast<int32_t>(groups.size()) - 1;
    segment.shard = {shape[0], shape[1], shape[2]};
    segment.mask = shape[3] != 0 ? SegmentMask::kAllVisible : SegmentMask::kAsConfig;
    segment.source = paged ? KvSource::kPaged : KvSource::kRagged;
    if (shape[4] != 0) {
      args.k_scale.data = k_scale.data();
      args.v_scale.data = v_scale.data();
      args.k_scale.granularity = args.v_scale.granularity = ScaleGranularity::kPerRequestAndHead;
      args.k_scale.request_stride = args.v_scale.request_stride = config.num_kv_heads;
    }
    paged ? lay_out_pages(config) : lay_out_ragged(config);
  }

  void lay_out_ragged(const AttentionConfig& config) {
    for (const int32_t length : lens) indptr.push_back(indptr.back() + length);
    args.ragged.k =
        ConstTensorView(k.data(), DType::kFloat32, {indptr.back(), config.num_kv_heads, config.head_dim_qk});
    args.ragged.v = ConstTensorView(v.data(), DType::kFloat32, {indptr.back(), config.num_kv_heads, config.head_dim_v});
    args.ragged.indptr = indptr.data();
  }

  void lay_out_pages(const AttentionConfig& config) {
    int32_t pages = 0;
    for (const int32_t length : lens) {
      pages += (length + config.page_size - 1) / config.page_size;
      indptr.push_back(pages);
    }
    for (int32_t page = pages; page-- > 0;) indices.push_back(page);
    const auto spread = [&](const std::vector<float>& packed, int64_t dim) {
      const int64_t token_size = config.num_kv_heads * dim;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      std::vector<float> cache(static_cast<size_t>(pages * config.page_size * token_size), nan);
      int64_t token = 0;
      for (size_t row = 0; row < lens.size(); ++row) {
        for (int32_t t = 0; t < lens[row]; ++t, ++token) {
          const int64_t page = indices[static_cast<size_t>(indptr[row] + t / config.page_size)];
          const int64_t slot = page * config.page_size + t % config.page_size;
          std::copy_n(packed.begin() + token * token_size, token_size, cache.begin() + slot * token_size);
        }
      }
      return cache;
    };
    k = spread(k, config.head_dim_qk);
    v = spread(v, config.head_dim_v);
    const auto strides = [&](int64_t dim) {
      return KvStrides{config.page_size * config.num_kv_heads * dim, config.num_kv_heads * dim, dim};
    };
    args.cache.dtype = DType::kFloat32;
    args.cache.k = k.data();
    args.cache.v = v.data();
    args.cache.num_pages = pages;
    args.cache.page_size = config.page_size;
    args.cache.k_strides = strides(config.head_dim_qk);
    args.cache.v_strides = strides(config.head_dim_v);
    args.table.indices = indices.data();
    args.table.indptr = indptr.data();
    args.table.num_rows = static_cast<int32_t>(lens.size());
  }
};

void check(const GoldenCase& golden, bool paged) {
  SCOPED_TRACE(golden.name + (paged ? " paged" : " ragged"));
  const Arrays& arrays = golden.arrays;
  const std::vector<int32_t> sizes = ints(arrays.at("sizes"));
  AttentionConfig config;
  config.num_q_heads = sizes[0];
  config.num_kv_heads = sizes[1];
  config.head_dim_qk = sizes[2];
  config.head_dim_v = sizes[3];
  config.mask = static_cast<MaskKind>(sizes[4]);
  config.window_left = sizes[5];
  config.window_right = sizes[6];
  config.page_size = 3;
  std::vector<int32_t> cu_q{0};
  for (const int32_t length : ints(arrays.at("q_lens"))) cu_q.push_back(cu_q.back() + length);
  const std::vector<int32_t> q_first = ints(arrays.at("q_first"));
  const std::vector<int32_t> tail = ints(arrays.at("tail"));
  const std::vector<float> q = floats(arrays.at("q"));
  const std::vector<float> slopes = floats(arrays.at("slopes"));
  const std::vector<float> sinks = floats(arrays.at("sinks"));
  std::vector<uint8_t> mask;
  for (const double byte : arrays.at("mask")) mask.push_back(static_cast<uint8_t>(byte));

  std::vector<LaidOut> laid_out;
  laid_out.reserve(golden.segments.size());
  std::vector<KvSegment> segments;
  std::vector<SegmentArgs> segment_args;
  for (const Arrays& segment : golden.segments) {
    laid_out.emplace_back(segment, config, paged);
    segments.push_back(laid_out.back().segment);
    segment_args.push_back(laid_out.back().args);
  }
  BatchView batch;
  batch.num_requests = sizes[7];
  batch.num_tokens = cu_q.back();
  batch.cu_q = cu_q.data();
  batch.q_first_pos = data_or_null(q_first);
  batch.segments = segments;
  batch.custom_mask.scope = sizes[9] != 0 ? CustomMaskScope::kTail : CustomMaskScope::kAll;
  batch.custom_mask.tail_len = data_or_null(tail);
  AttentionArgs args;
  args.q = ConstTensorView(q.data(), DType::kFloat32, {cu_q.back(), config.num_q_heads, config.head_dim_qk});
  args.segments = segment_args;
  args.sm_scale = static_cast<float>(arrays.at("logit")[0]);
  args.logits_soft_cap = static_cast<float>(arrays.at("logit")[1]);
  args.alibi_slopes = data_or_null(slopes);
  args.sinks = data_or_null(sinks);
  if (const std::vector<float> rope = floats(arrays.at("rope")); !rope.empty()) {
    config.features = Feature::kRopeLlama;
    args.rope = {rope[0], rope[1]};
  }
  args.custom_mask = mask.data();
  args.custom_mask_bytes = static_cast<int64_t>(mask.size());

  const std::vector<double>& want = arrays.at("out");
  const std::vector<double>& want_lse = arrays.at("lse");
  std::vector<double> out(want.size());
  std::vector<double> lse(want_lse.size());
  reference_attention(config, batch, args, out, lse);
  const double close = 1e-11;  // the file has 12 digits of values below 10
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(out[i], want[i], close) << "component " << i;
  for (size_t i = 0; i < want_lse.size(); ++i) {
    if (std::isinf(want_lse[i])) {
      ASSERT_EQ(lse[i], want_lse[i]) << "row " << i;
    } else {
      ASSERT_NEAR(lse[i], want_lse[i], close) << "row " << i;
    }
  }
}

TEST(GoldenAttention, TheOracleAgreesWithAnIndependentProgram) {
  const std::vector<GoldenCase> cases = read_cases();
  ASSERT_EQ(cases.size(), 14u);
  for (const GoldenCase& golden : cases) {
    check(golden, false);
    check(golden, true);
  }
}

}  // namespace
}  // namespace folio::inline v0::verify
