#include "folio/backends/flashinfer/wrappers.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "backends/flashinfer/batch_test_util.hpp"
#include "backends/flashinfer/group_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/page_table.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::BatchFixture;
using testing::BatchLengths;
using ::testing::HasSubstr;
using testing::LayerSetup;
using testing::message_of;

/// A fixture whose keys lie in the cache already, as a wrapper's caller would describe it.
struct Serving {
  BatchFixture fixture;
  PagedMetadata csr;

  explicit Serving(LayerSetup setup, const BatchLengths& lengths = backend_batch("mixed_small"))
      : fixture((setup.share_kv = true, setup), lengths) {
    csr = to_csr(to_page_table(fixture.batch.block_table, fixture.batch.num_reqs), fixture.seq_lens, setup.page_size);
  }

  WrapperPages pages() const { return {csr.indptr, csr.indices, csr.last_page_len}; }

  WrapperPlanOptions options() const {
    const LayerSetup& setup = fixture.setup;
    WrapperPlanOptions options;
    options.num_qo_heads = setup.num_heads;
    options.num_kv_heads = setup.num_kv_heads;
    options.head_dim_qk = setup.head_size;
    options.page_size = setup.page_size;
    options.causal = true;
    options.window_left = setup.sliding_window ? *setup.sliding_window - 1 : -1;
    options.logits_soft_cap = setup.logits_soft_cap.value_or(0.0f);
    options.sinks = setup.sinks;
    options.q_data_type = fixture.query.dtype;
    options.kv_data_type = kv_cache_dtype_from_name(setup.cache_dtype, setup.model_dtype);
    options.o_data_type = setup.model_dtype;
    return options;
  }

  WrapperRunArgs run_args() const {
    WrapperRunArgs args;
    args.q_scale = fixture.setup.q_scale;
    args.k_scale = fixture.setup.k_scale;
    args.v_scale = fixture.setup.v_scale;
    args.sinks = fixture.setup.sinks ? fixture.sinks.data() : nullptr;
    return args;
  }

  /// The cache in the layout's own order of dimensions.
  WrapperKvCache kv_cache() const {
    ConstTensorView cache = fixture.kv_cache;
    cache.dtype = kv_cache_dtype_from_name(fixture.setup.cache_dtype, fixture.setup.model_dtype);
    if (fixture.setup.layout == KvCacheLayout::kHnd) {
      std::swap(cache.shape[2], cache.shape[3]);
      std::swap(cache.strides[2], cache.strides[3]);
    }
    return WrapperKvCache(cache);
  }
};

std::vector<LayerSetup> setups() {
  std::vector<LayerSetup> all;
  for (const KvCacheLayout layout : {KvCacheLayout::kNhd, KvCacheLayout::kHnd}) {
    LayerSetup plain;
    plain.layout = layout;
    all.push_back(plain);
    LayerSetup windowed = plain;
    windowed.sliding_window = 20;
    windowed.logits_soft_cap = 30.0f;
    windowed.sinks = true;
    windowed.model_dtype = DType::kFloat16;
    all.push_back(windowed);
    LayerSetup quantised = plain;
    quantised.cache_dtype = "fp8_e4m3";
    quantised.quantize_query = true;
    quantised.q_scale = 0.5f;
    quantised.k_scale = 0.25f;
    quantised.v_scale = 2.0f;
    all.push_back(quantised);
  }
  return all;
}

TEST(PrefillWrapper, GivesTheOraclesOutput) {
  for (const LayerSetup& setup : setups()) {
    Serving serving(setup);
    BatchPrefillWithPagedKVCacheWrapper wrapper(serving.fixture.context, setup.layout);
    wrapper.plan(serving.fixture.query_start_loc, serving.pages(), serving.options());
    wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output, serving.run_args());
    EXPECT_EQ(serving.fixture.wrong_output(), "");
    if (!folio::testing::on_gpu()) {  // whose plan of so little divides nothing
      EXPECT_GT(wrapper.workspace_size(), 0u);
    }
    WrapperPages on_device = serving.pages();
    on_device.indices_where = Where::kDevice;
    const auto plan = [&] { wrapper.plan(serving.fixture.query_start_loc, on_device, serving.options()); };
    if (!folio::testing::on_gpu()) {
      EXPECT_THAT(message_of(plan), HasSubstr("paged_kv_indices are on a device"));
      continue;
    }
    plan();
    std::ranges::fill(serving.fixture.out_memory, testing::kUnwritten);
    wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output, serving.run_args());
    EXPECT_EQ(serving.fixture.wrong_output(), "") << "indices on the device";
  }
}

TEST(DecodeWrapper, GivesTheOraclesOutput) {
  const BatchLengths several{"three each", {32, 40, 100}, {3, 3, 3}};
  for (const LayerSetup& setup : setups()) {
    for (const int32_t q_len : {1, 3}) {
      Serving serving(setup, q_len == 1 ? backend_batch("small_decode") : several);
      BatchDecodeWithPagedKVCacheWrapper wrapper(serving.fixture.context, setup.layout);
      wrapper.plan(serving.pages(), serving.options(), q_len);
      wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output, serving.run_args());
      EXPECT_EQ(serving.fixture.wrong_output(), "") << q_len;
    }
  }
}

TEST(DecodeWrapper, TakesGoldenLengthsOfFlashInfersTests) {
  for (const BatchLengths& lengths :
       {BatchLengths{"a", {1328, 18, 463}, {1, 1, 1}}, BatchLengths{"b", {1, 54, 293, 70}, {1, 1, 1, 1}}}) {
    for (const int32_t page_size : {16, 32}) {
      LayerSetup setup;
      setup.num_heads = 6;
      setup.num_kv_heads = 1;
      setup.head_size = 128;
      setup.page_size = page_size;
      setup.sliding_window = page_size == 16 ? std::optional<int32_t>(64) : std::nullopt;
      setup.logits_soft_cap = 30.0f;
      Serving serving(setup, lengths);
      BatchDecodeWithPagedKVCacheWrapper wrapper(serving.fixture.context);
      wrapper.plan(serving.pages(), serving.options());
      wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output);
      EXPECT_EQ(serving.fixture.wrong_output(), "") << lengths.name;
    }
  }
}

TEST(CascadeWrapper, GivesTheOraclesOutputAtEveryDepth) {
  for (const LayerSetup& setup : setups()) {
    for (const int32_t num_levels : {1, 2, 3}) {
      // Level l has page l of every request as a row of its own; the last level has the rest.
      Serving serving(setup, {"long enough", {48, 57, 64, 40}, {1, 1, 5, 5}});
      const auto requests = static_cast<int32_t>(serving.fixture.seq_lens.size());
      std::vector<PagedMetadata> levels(static_cast<size_t>(num_levels));
      for (int32_t l = 0; l < num_levels; ++l) {
        PagedMetadata& level = levels[static_cast<size_t>(l)];
        level.indptr = {0};
        for (int32_t r = 0; r < requests; ++r) {
          const auto at = static_cast<size_t>(r);
          const bool last = l + 1 == num_levels;
          const int32_t begin = serving.csr.indptr[at] + l;
          const int32_t end = last ? serving.csr.indptr[at + 1] : begin + 1;
          level.indices.insert(level.indices.end(), serving.csr.indices.begin() + begin,
                               serving.csr.indices.begin() + end);
          level.indptr.push_back(static_cast<int32_t>(level.indices.size()));
          level.last_page_len.push_back(last ? serving.csr.last_page_len[at] : setup.page_size);
        }
      }
      std::vector<WrapperPages> pages;
      for (const PagedMetadata& level : levels) pages.push_back({level.indptr, level.indices, level.last_page_len});
      const std::vector<std::span<const int32_t>> qo_indptr(levels.size(), serving.fixture.query_start_loc);
      MultiLevelCascadeAttentionWrapper wrapper(serving.fixture.context, num_levels, setup.layout);
      wrapper.plan(qo_indptr, pages, serving.options());
      wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output, serving.run_args());
      EXPECT_EQ(serving.fixture.wrong_output(), "") << num_levels << " levels";
    }
  }
}

/// An LSE: sums of exponentials are exact here, or nearly so; the logarithm of a GPU's kernels has some last bits less.
void expect_lse(float value, float expected, const std::string& where = "") {
  if (folio::testing::on_gpu() && std::isfinite(expected)) {
    EXPECT_NEAR(value, expected, 0x1p-20) << where;
  } else {
    EXPECT_FLOAT_EQ(value, expected) << where;
  }
}

/// Numbers that float16 holds, which is what a GPU is given.
std::vector<std::byte> stored(size_t count, float value, DType dtype) {
  std::vector<std::byte> memory(count * static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < count; ++i) store_from_float(memory.data(), dtype, static_cast<int64_t>(i), value);
  return memory;
}

/// Zero keys: every logit is 0, so that an LSE counts the visible keys.
struct ZeroKeys {
  Context context = folio::testing::device_context(1);
  DType dtype = folio::testing::on_gpu() ? DType::kFloat16 : DType::kFloat32;
  std::vector<std::byte> q = stored(3 * 2 * 8, 1.0f, dtype);
  std::vector<std::byte> k = stored(5 * 8, 0.0f, dtype);
  std::vector<std::byte> v = stored(5 * 8, 1.0f, dtype);
  std::vector<std::byte> out = stored(3 * 2 * 8, -1.0f, dtype);
  std::vector<float> lse = std::vector<float>(3 * 2);
  std::vector<int32_t> qo_indptr{0, 3};
  std::vector<int32_t> kv_indptr{0, 5};
  WrapperPlanOptions options;

  ZeroKeys() {
    options.num_qo_heads = 2;
    options.num_kv_heads = 1;
    options.head_dim_qk = 8;
    options.q_data_type = dtype;
  }
  void run(const WrapperMask& mask = {}) {
    BatchPrefillWithRaggedKVCacheWrapper wrapper(context);
    wrapper.plan(qo_indptr, kv_indptr, options, mask);
    WrapperRunArgs args;
    args.lse = lse.data();
    wrapper.run(ConstTensorView(q.data(), dtype, {3, 2, 8}), ConstTensorView(k.data(), dtype, {5, 1, 8}),
                ConstTensorView(v.data(), dtype, {5, 1, 8}), TensorView(out.data(), dtype, {3, 2, 8}), args);
  }
};

TEST(RaggedWrapper, ReportsTheLseInBaseTwo) {
  ZeroKeys zero;
  zero.run();
  for (const float value : zero.lse) expect_lse(value, std::log2(5.0f), "5 keys, not causal");
  zero.options.causal = true;
  zero.run();
  for (size_t i = 0; i < 6; ++i) expect_lse(zero.lse[i], std::log2(3.0f + static_cast<float>(i / 2)));
  zero.options.window_left = 1;
  zero.run();
  for (const float value : zero.lse) expect_lse(value, 1.0f, "the query's own key and one before it");
}

// Where all components of queries and keys are 1, a logit is the sum of 2 cos(distance * speed) over the pairs.
TEST(RaggedWrapper, TurnsQueriesAndKeysByTheirPositions) {
  ZeroKeys zero;
  zero.k = stored(5 * 8, 1.0f, zero.dtype);
  zero.options.sm_scale = 0.25f;
  for (const auto& [theta, scale] : {std::pair{1e4f, 1.0f}, {100.0f, 2.5f}}) {
    zero.options.pos_encoding_mode = PosEncodingMode::kRopeLlama;
    zero.options.rope_theta = theta;
    zero.options.rope_scale = scale;
    zero.run();
    for (int32_t row = 0; row < 3; ++row) {
      double sum = 0.0;
      for (int32_t key = 0; key < 5; ++key) {
        double logit = 0.0;
        for (int32_t pair = 0; pair < 4; ++pair) {
          const double speed = std::pow(static_cast<double>(theta), -pair / 4.0) / static_cast<double>(scale);
          logit += 0.25 * 2.0 * std::cos((row + 2 - key) * speed);
        }
        sum += std::exp(logit);
      }
      EXPECT_NEAR(zero.lse[static_cast<size_t>(row * 2)], std::log2(sum), 1e-5) << theta << ", " << row;
    }
  }
}

TEST(RaggedWrapper, AddsAlibiAsFlashInferDoes) {
  ZeroKeys zero;
  zero.options.causal = true;
  zero.options.pos_encoding_mode = PosEncodingMode::kAlibi;
  zero.run();
  for (int32_t row = 0; row < 3; ++row) {
    for (int32_t head = 0; head < 2; ++head) {
      double sum = 0.0;
      for (int32_t key = 0; key <= row + 2; ++key) {
        sum += std::exp(static_cast<double>(standard_alibi_slope(head, 2)) * (key - row));
      }
      EXPECT_NEAR(zero.lse[static_cast<size_t>(row * 2 + head)], std::log2(sum),
                  (folio::testing::on_gpu() ? 64 : 16) * 0x1p-23)
          << row << ", " << head;
    }
  }
  EXPECT_FLOAT_EQ(standard_alibi_slope(0, 8), 0.5f);
  EXPECT_FLOAT_EQ(standard_alibi_slope(7, 8), 0x1p-8f);
  EXPECT_FLOAT_EQ(standard_alibi_slope(2, 3), 0.25f) << "the first odd step of 4 heads";
}

TEST(RaggedWrapper, TakesMasksAsBoolsAndPacked) {
  ZeroKeys zero;
  const std::vector<uint8_t> bools{1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0};
  zero.run({bools, {}});
  const std::vector<float> from_bools = zero.lse;
  expect_lse(from_bools[0], 0.0f);
  expect_lse(from_bools[2], std::log2(3.0f));
  EXPECT_EQ(from_bools[4], -INFINITY) << "nothing visible";
  EXPECT_EQ(load_as_float(zero.out.data(), zero.dtype, 2 * 2 * 8), 0.0f);
  const std::vector<uint8_t> packed{0b01100001, 0b00000010};
  zero.run({{}, packed});
  EXPECT_EQ(zero.lse, from_bools);
  EXPECT_THAT(message_of([&] { zero.run({bools, packed}); }), HasSubstr("both given"));
  EXPECT_THAT(message_of([&] { zero.run({std::span(bools).first(14), {}}); }), HasSubstr("the batch has"));
  EXPECT_THAT(message_of([&] { zero.run({{}, std::span(packed).first(1)}); }), HasSubstr("the batch needs 2"));
}

// The mask of a draft is a row of bits, the first draft lowest. As a custom mask it means what causality means by
// itself.
TEST(RaggedWrapper, TakesTheGoldenMasksOfDrafts) {
  const nlohmann::json document = folio::testing::golden("flashinfer/block_table");
  for (const nlohmann::json& golden : document.at("draft_masks")) {
    SCOPED_TRACE(golden.dump());
    const auto rows = golden.at("rows").get<std::vector<uint32_t>>();
    std::vector<int32_t> indptr{0};
    std::vector<uint8_t> bools;
    for (const int32_t q_len : golden.at("q_lens").get<std::vector<int32_t>>()) {
      indptr.push_back(indptr.back() + q_len);
      for (int32_t row = indptr[indptr.size() - 2]; row < indptr.back(); ++row) {
        for (int32_t key = 0; key < q_len; ++key) bools.push_back(rows[static_cast<size_t>(row)] >> key & 1);
      }
    }
    const auto tokens = static_cast<int64_t>(rows.size());
    for (const bool masked : {false, true}) {
      ZeroKeys zero;
      zero.options.causal = golden.at("causal");
      std::vector<float> lse(rows.size() * 2);
      const std::vector<std::byte> memory = stored(rows.size() * 16, 0.0f, zero.dtype);
      std::vector<std::byte> out = memory;
      BatchPrefillWithRaggedKVCacheWrapper wrapper(zero.context);
      wrapper.plan(indptr, indptr, zero.options, masked ? WrapperMask{bools, {}} : WrapperMask{});
      WrapperRunArgs args;
      args.lse = lse.data();
      const ConstTensorView keys(memory.data(), zero.dtype, {tokens, 1, 8});
      wrapper.run(ConstTensorView(memory.data(), zero.dtype, {tokens, 2, 8}), keys, keys,
                  TensorView(out.data(), zero.dtype, {tokens, 2, 8}), args);
      for (size_t row = 0; row < rows.size(); ++row) {
        expect_lse(lse[row * 2], std::log2(static_cast<float>(std::popcount(rows[row]))), std::to_string(row));
      }
    }
  }
}

TEST(FastPlanDecode, FixesTheShapeAfterTheFirstCall) {
  Serving serving({}, backend_batch("small_decode"));
  const auto pages = static_cast<int64_t>(serving.csr.indices.size());
  BatchDecodeWithPagedKVCacheWrapper wrapper(serving.fixture.context, KvCacheLayout::kNhd, 2, pages);
  EXPECT_TRUE(wrapper.is_cuda_graph_enabled());
  for (int step = 0; step < 3; ++step) {
    fast_plan_decode(wrapper, serving.pages(), serving.options());
    wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output);
    EXPECT_EQ(serving.fixture.wrong_output(), "");
  }
  const std::vector<int32_t> indptr{0, 1}, last{1};
  EXPECT_EQ(message_of([&] {
              fast_plan_decode(wrapper, {indptr, serving.csr.indices, last}, serving.options());
            }),
            "The batch size should be fixed in cudagraph mode, the runtime batch size 1 mismatches the batch size set "
            "during initialization 2");
  EXPECT_THROW(wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output), Error) << "no plan";
  std::vector<int32_t> more = serving.csr.indices;
  more.push_back(1);
  EXPECT_EQ(message_of([&] {
              fast_plan_decode(wrapper, {serving.csr.indptr, more, serving.csr.last_page_len}, serving.options());
            }),
            "The size of indices should be less than or equal to the allocated buffer");
  std::vector<int32_t> bad = serving.csr.last_page_len;
  bad[0] = 99;
  EXPECT_THAT(message_of(
                  [&] {
                    fast_plan_decode(wrapper, {serving.csr.indptr, serving.csr.indices, bad}, serving.options());
                  },
                  ErrorCode::kUnavailable),
              HasSubstr("Error in tensor core plan: "));
  BatchDecodeWithPagedKVCacheWrapper general(serving.fixture.context);
  fast_plan_decode(general, serving.pages(), serving.options());
  general.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output);
  EXPECT_EQ(serving.fixture.wrong_output(), "");
}

TEST(Wrappers, RefuseWhatTheyCannotDo) {
  Serving serving({});
  BatchPrefillWithPagedKVCacheWrapper wrapper(serving.fixture.context);
  EXPECT_THAT(message_of([&] { wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output); }),
              HasSubstr("plan has not been called"));
  const auto plan = [&](auto&& change, ErrorCode code = ErrorCode::kInvalidArgument) {
    WrapperPlanOptions options = serving.options();
    change(options);
    return message_of([&] { wrapper.plan(serving.fixture.query_start_loc, serving.pages(), options); }, code);
  };
  EXPECT_THAT(plan([](auto& o) { o.pos_encoding_mode = PosEncodingMode::kAlibi, o.causal = false; }),
              HasSubstr("without causal"));
  EXPECT_THAT(
      plan([](auto& o) { o.pos_encoding_mode = PosEncodingMode::kAlibi, o.sinks = true; }, ErrorCode::kUnsupported),
      HasSubstr("ALIBI with sinks"));
  EXPECT_THAT(plan([](auto& o) { o.rope_theta = 5e5f; }), HasSubstr("pos_encoding_mode is not ROPE_LLAMA"));
  EXPECT_THAT(plan([](auto& o) { o.rope_scale = 8.0f; }), HasSubstr("pos_encoding_mode is not ROPE_LLAMA"));
  EXPECT_THAT(plan([](auto& o) { o.logits_soft_cap = -1.0f; }), HasSubstr("logits_soft_cap is -1"));

  // Sinks are refused rather than dropped, which cost the original's users their accuracy.
  wrapper.plan(serving.fixture.query_start_loc, serving.pages(), serving.options());
  WrapperRunArgs with_sinks;
  const std::vector<float> sinks(4, 0.5f);
  with_sinks.sinks = sinks.data();
  EXPECT_THAT(
      message_of([&] { wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output, with_sinks); }),
      HasSubstr("sinks"));
  WrapperPlanOptions options = serving.options();
  options.sinks = true;
  wrapper.plan(serving.fixture.query_start_loc, serving.pages(), options);
  EXPECT_THAT(message_of([&] { wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output); }),
              HasSubstr("are not given"));

  BatchDecodeWithPagedKVCacheWrapper decode(serving.fixture.context);
  EXPECT_THAT(message_of([&] { decode.plan(serving.pages(), serving.options(), 33); }),
              HasSubstr("q_len_per_req is 33"));
  EXPECT_THAT(message_of([&] { MultiLevelCascadeAttentionWrapper(serving.fixture.context, 9); }),
              HasSubstr("num_levels is 9"));
  MultiLevelCascadeAttentionWrapper cascade(serving.fixture.context, 2);
  const std::vector<int32_t> within{0, 3, 12};
  const std::vector<std::span<const int32_t>> qo_indptr{within, serving.fixture.query_start_loc};
  const std::vector<int32_t> indptr{0, 1, 2}, indices{1, 2}, last{16, 16};
  const std::vector<WrapperPages> pages{{indptr, indices, last}, serving.pages()};
  EXPECT_THAT(message_of([&] { cascade.plan(qo_indptr, pages, serving.options()); }),
              HasSubstr("qo_indptr_arr[0][1] is 3, which is within a request"));
}

// Without a row there is none that the requests could be of, although both levels end at token 0.
TEST(CascadeWrapper, ALevelWithoutRows_UnderRequests_IsRefused) {
  ZeroKeys zero;
  MultiLevelCascadeAttentionWrapper cascade(zero.context, 2);
  const std::vector<int32_t> none{0}, two_without_tokens{0, 0, 0}, no_keys{0, 0};
  const std::vector<std::span<const int32_t>> qo_indptr{none, two_without_tokens};
  const std::vector<WrapperPages> pages{{none, {}, {}}, {two_without_tokens, {}, no_keys}};
  EXPECT_EQ(message_of([&] { cascade.plan(qo_indptr, pages, zero.options); }),
            "qo_indptr_arr[0] has no row for the 2 requests of the last level");
}

// A mask of bools is packed by the lengths that the indptrs give: they are checked first.
TEST(Wrappers, Plan_FallingIndptr_IsRefused) {
  ZeroKeys zero;
  const std::vector<int32_t> falling{0, 1, 0}, rising{0, 1, 1};
  const std::vector<uint8_t> bools(1, 1);
  BatchPrefillWithRaggedKVCacheWrapper ragged(zero.context);
  EXPECT_THAT(message_of([&] {
                ragged.plan(falling, rising, zero.options, {bools, {}});
              }),
              HasSubstr("qo_indptr descends from 1 to 0 at request 1"));
  EXPECT_THAT(message_of([&] {
                ragged.plan(rising, falling, zero.options, {bools, {}});
              }),
              HasSubstr("kv_indptr descends from 1 to 0 at request 1"));

  WrapperPlanOptions options = zero.options;
  options.page_size = 1;
  const std::vector<int32_t> indices{0}, last{1, 1}, last_of_one{1, 0};
  const WrapperPages pages{rising, indices, last_of_one};
  BatchPrefillWithPagedKVCacheWrapper paged(zero.context);
  EXPECT_THAT(message_of([&] {
                paged.plan(falling, pages, options, {bools, {}});
              }),
              HasSubstr("qo_indptr descends from 1 to 0 at request 1"));
  EXPECT_THAT(message_of([&] {
                paged.plan(rising, {falling, indices, last}, options, {bools, {}});
              }),
              HasSubstr("indptr descends from 1 to 0 at request 1"));

  BatchDecodeWithPagedKVCacheWrapper decode(zero.context);
  EXPECT_THAT(message_of([&] {
                decode.plan({falling, indices, last}, options);
              }),
              HasSubstr("indptr descends from 1 to 0 at request 1"));
  MultiLevelCascadeAttentionWrapper cascade(zero.context, 2);
  const std::vector<std::span<const int32_t>> last_falls{rising, falling}, first_falls{falling, rising};
  const std::vector<WrapperPages> both{pages, pages};
  EXPECT_THAT(message_of([&] { cascade.plan(last_falls, both, options); }),
              HasSubstr("qo_indptr descends from 1 to 0 at request 1"));
  EXPECT_THAT(message_of([&] { cascade.plan(first_falls, both, options); }), HasSubstr("qo_indptr_arr[0] is from 0"));
}

TEST(Wrappers, Run_AfterAPlanThatFailed_IsRefused) {
  Serving serving({});
  BatchPrefillWithPagedKVCacheWrapper wrapper(serving.fixture.context);
  wrapper.plan(serving.fixture.query_start_loc, serving.pages(), serving.options());
  std::vector<int32_t> falling = serving.fixture.query_start_loc;
  falling.back() = 0;
  message_of([&] { wrapper.plan(falling, serving.pages(), serving.options()); });
  EXPECT_EQ(message_of([&] { wrapper.run(serving.fixture.query, serving.kv_cache(), serving.fixture.output); }),
            "plan has not been called");
}

}  // namespace
}  // namespace folio::inline v0::backends
