#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/device_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/attention.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/merge.hpp"
#include "folio/page_table.hpp"
#include "folio/pools.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using nlohmann::json;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

/// The original test's, relative and absolute. On a GPU the cases are in float16.
const float kGoldenTolerance = folio::testing::on_gpu() ? 4e-3f : 1e-3f;
const DType kDType = folio::testing::on_gpu() ? DType::kFloat16 : DType::kFloat32;

void expect_near(std::span<const float> actual, const Floats& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], kGoldenTolerance * (1 + std::abs(expected[i]))) << i;
  }
}

/// One request with one head: rows of q, k and v, of `dim` components that count, padded with zeros to 8.
struct Sequence {
  static constexpr int32_t kDim = 8;
  Sequence(const std::vector<Floats>& q, const std::vector<Floats>& k, const std::vector<Floats>& v) {
    for (const auto& [rows, to] : {std::pair{&q, &q_}, std::pair{&k, &k_}, std::pair{&v, &v_}}) {
      to->resize(rows->size() * kDim * static_cast<size_t>(size_of(kDType)));
      for (size_t r = 0; r < rows->size(); ++r) {
        const Floats& row = (*rows)[r];
        for (size_t d = 0; d < kDim; ++d) {
          store_from_float(to->data(), kDType, static_cast<int64_t>(r * kDim + d), d < row.size() ? row[d] : 0.0f);
        }
      }
    }
  }
  ConstTensorView rows(const std::vector<std::byte>& values, size_t first, size_t count) const {
    const size_t row_bytes = kDim * static_cast<size_t>(size_of(kDType));
    return {values.data() + first * row_bytes, kDType, {static_cast<int64_t>(count), 1, kDim}};
  }

  std::vector<std::byte> q_, k_, v_;
};

/// Steps of one sequence through a pool of its own.
class Server {
 public:
  Server(const Sequence& sequence, float scale, float cap, ExtendPath path) : sequence_(sequence) {
    layer_ = {1, Sequence::kDim, scale, 1, 0, cap};
    config_.num_heads = config_.num_kv_heads = 1;
    config_.head_dim = Sequence::kDim;
    config_.q_dtype = config_.kv_cache_dtype = kDType;
    config_.max_context_len = 16;
    config_.req_to_token = table_.table();
    config_.max_req_pool_size = 2;
    config_.logit_cap = cap > 0.0f;
    config_.extend_path = path;
    row_ = *table_.alloc();
    for (int32_t p = 0; p < 16; ++p) table_.write(row_, p, Ints{16 - p});
    const PageTableView table = table_.table();
    entries_.assign(table.indices, table.indices + table.num_indices);  // the pool's own are the host's
    config_.req_to_token.indices = entries_.data();
  }

  /// Outputs of the tokens [cached, length), `dim` components each.
  Floats step(ForwardMode mode, size_t cached, size_t length, size_t dim, bool captured = false) {
    TokenPoolBackend backend(context_, config_);
    const Ints rows{row_}, seq_lens{static_cast<int32_t>(length)}, prefix{static_cast<int32_t>(cached)};
    std::vector<int64_t> slots;
    for (size_t p = cached; p < length; ++p) slots.push_back(16 - static_cast<int64_t>(p));
    ForwardBatch batch;
    batch.forward_mode = mode;
    batch.batch_size = 1;
    batch.req_pool_indices = rows;
    batch.seq_lens = batch.seq_lens_cpu = seq_lens;
    if (is_extend(mode)) batch.extend_prefix_lens = batch.extend_prefix_lens_cpu = prefix;
    batch.out_cache_loc = slots;
    batch.token_to_kv_pool = &pool_;
    if (captured) {
      backend.init_cuda_graph_state(2, 2);
      const Ints ones{1};
      backend.init_forward_metadata_capture_cuda_graph(1, 1, rows, ones, mode);
      backend.init_forward_metadata_replay_cuda_graph(1, rows, seq_lens, seq_lens[0], mode, seq_lens);
    } else {
      backend.init_forward_metadata(batch);
    }
    const size_t count = length - cached;
    std::vector<std::byte> out(count * Sequence::kDim * static_cast<size_t>(size_of(kDType)));
    layer_.forward(backend, sequence_.rows(sequence_.q_, cached, count), sequence_.rows(sequence_.k_, cached, count),
                   sequence_.rows(sequence_.v_, cached, count), batch,
                   TensorView(out.data(), kDType, {static_cast<int64_t>(count), 1, Sequence::kDim}));
    Floats components;
    for (size_t t = 0; t < count; ++t) {
      for (size_t d = 0; d < dim; ++d) {
        components.push_back(load_as_float(out.data(), kDType, static_cast<int64_t>(t * Sequence::kDim + d)));
      }
    }
    return components;
  }

 private:
  const Sequence& sequence_;
  static constexpr KvPoolConfig pool_config(DType dtype) {
    return {.num_slots = 16,
            .num_layers = 1,
            .num_kv_heads = 1,
            .head_dim_qk = Sequence::kDim,
            .head_dim_v = Sequence::kDim,
            .dtype = dtype};
  }
  Context context_ = folio::testing::device_context();
  ReqToTokenPool table_{2, 16};
  Ints entries_;
  std::vector<std::byte> k_memory_ = std::vector<std::byte>(KvPool::k_bytes_per_layer(pool_config(kDType)));
  std::vector<std::byte> v_memory_ = k_memory_;
  std::array<void*, 1> k_{k_memory_.data()}, v_{v_memory_.data()};
  KvPool pool_{pool_config(kDType), k_, v_};
  TokenPoolConfig config_;
  RadixAttention layer_;
  int32_t row_ = 0;
};

/// A cap reaches every path: ragged, paged, merged, decoded, and decoded from a captured shape.
TEST(TokenPoolGolden, SoftCaps) {
  const json document = golden("token_pool/backend");
  const json& group = document.at("soft_cap");
  std::vector<Floats> q, k, v;
  for (size_t i = 0; i < 3; ++i) {
    q.push_back({1.0f});
    k.push_back({group.at("logits")[i].get<float>()});
    v.push_back({group.at("values")[i].get<float>()});
  }
  const Sequence sequence(q, k, v);
  for (const json& c : group.at("cases")) {
    SCOPED_TRACE(c.dump());
    const auto expected = c.at("out").get<Floats>();
    const float cap = c.at("cap");
    for (const ExtendPath path : {ExtendPath::kRagged, ExtendPath::kPaged}) {
      Server whole(sequence, 1.0f, cap, path);
      expect_near(whole.step(ForwardMode::kExtend, 0, 3, 1), expected);
      Server halves(sequence, 1.0f, cap, path);
      expect_near(halves.step(ForwardMode::kExtend, 0, 1, 1), {expected[0]});
      expect_near(halves.step(ForwardMode::kExtend, 1, 3, 1), {expected[1], expected[2]});
    }
    for (const bool captured : {false, true}) {
      Server server(sequence, 1.0f, cap, ExtendPath::kAuto);
      for (size_t p = 0; p < 3; ++p) {
        expect_near(server.step(ForwardMode::kDecode, p, p + 1, 1, captured), {expected[p]});
      }
    }
  }
}

Floats flat(const json& rows) {
  Floats values;
  for (const json& row : rows) {
    for (const json& value : row) values.push_back(value);
  }
  return values;
}

/// One side of an extend on its own, by the core: outputs of two components, and LSEs in base 2.
struct Side {
  Side(const Sequence& sequence, size_t first, size_t count, MaskKind mask, float scale)
      : out(3 * Sequence::kDim), lse(3) {
    AttentionConfig config;
    config.num_q_heads = config.num_kv_heads = 1;
    config.head_dim_qk = config.head_dim_v = Sequence::kDim;
    config.q = config.kv = kDType;
    config.out = DType::kFloat32;
    config.mask = mask;
    const AttentionOp op = prepare(context, config);
    PlanBuffer buffer = make_plan_buffer(op);
    const Ints cu_q{0, 3}, kv_len{static_cast<int32_t>(count)}, indptr{0, static_cast<int32_t>(count)};
    KvSegment segment;
    segment.source = KvSource::kRagged;
    segment.kv_len = kv_len.data();
    BatchView batch;
    batch.num_requests = 1;
    batch.num_tokens = 3;
    batch.cu_q = cu_q.data();
    batch.segments = {&segment, 1};
    const AttentionPlan planned = plan(op, batch, buffer);
    SegmentArgs ragged;
    ragged.ragged = {sequence.rows(sequence.k_, first, count), sequence.rows(sequence.v_, first, count), indptr.data()};
    AttentionArgs args;
    args.q = sequence.rows(sequence.q_, 0, 3);
    args.out = {out.data(), DType::kFloat32, {3, 1, Sequence::kDim}};
    args.lse = {lse.data(), 1, 1, LseBase::k2};
    args.segments = {&ragged, 1};
    args.sm_scale = scale;
    std::vector<std::byte> memory(workspace_size(op) + 256);
    void* aligned = memory.data();
    size_t bytes = memory.size();
    std::align(256, workspace_size(op), aligned, bytes);
    run(planned, args, {aligned, workspace_size(op)});
  }
  Floats two_components() const {
    Floats values;
    for (size_t t = 0; t < 3; ++t) {
      for (size_t d = 0; d < 2; ++d) values.push_back(out[t * Sequence::kDim + d]);
    }
    return values;
  }
  AttentionStateView state() const {
    return {ConstTensorView(out.data(), DType::kFloat32, {3, 1, Sequence::kDim}), lse.data(), 1, 1, LseBase::k2};
  }
  Context context = folio::testing::device_context();
  Floats out, lse;
};

/// Both sides of an extend of three tokens behind two, their merge, and what the backend makes of it by either path.
TEST(TokenPoolGolden, SidesOfAnExtendMerge) {
  const json document = golden("token_pool/backend");
  const json& c = document.at("merge");
  const Sequence sequence(c.at("q").get<std::vector<Floats>>(), c.at("k").get<std::vector<Floats>>(),
                          c.at("v").get<std::vector<Floats>>());
  const float scale = c.at("scale");
  const size_t prefix = c.at("prefix");
  const Side ragged(sequence, prefix, 3, MaskKind::kCausal, scale);
  const Side paged(sequence, 0, prefix, MaskKind::kNone, scale);
  expect_near(ragged.two_components(), flat(c.at("ragged").at("out")));
  expect_near(ragged.lse, c.at("ragged").at("lse2").get<Floats>());
  expect_near(paged.two_components(), flat(c.at("paged").at("out")));
  expect_near(paged.lse, c.at("paged").at("lse2").get<Floats>());
  Side merged = ragged;
  merge_state(merged.context, ragged.state(), paged.state(),
              TensorView(merged.out.data(), DType::kFloat32, {3, 1, Sequence::kDim}),
              {merged.lse.data(), 1, 1, LseBase::k2});
  expect_near(merged.two_components(), flat(c.at("merged").at("out")));
  expect_near(merged.lse, c.at("merged").at("lse2").get<Floats>());
  // The same from the pool. The queries of the cached tokens do not matter; the fixture has those of new ones.
  std::vector<Floats> q = {{0.0f}, {0.0f}};
  for (const json& row : c.at("q")) q.push_back(row.get<Floats>());
  const Sequence served(q, c.at("k").get<std::vector<Floats>>(), c.at("v").get<std::vector<Floats>>());
  for (const ExtendPath path : {ExtendPath::kRagged, ExtendPath::kPaged}) {
    Server server(served, scale, 0.0f, path);
    server.step(ForwardMode::kExtend, 0, prefix, 2);
    expect_near(server.step(ForwardMode::kExtend, prefix, 5, 2), flat(c.at("merged").at("out")));
  }
}

TEST(TokenPoolGolden, EmptySidesDropOut) {
  const json document = golden("token_pool/backend");
  const Context context = folio::testing::device_context();
  const float empty = -std::numeric_limits<float>::infinity();
  for (const json& c : document.at("empty_sides")) {
    SCOPED_TRACE(c.dump());
    const auto lse_of = [&](const char* field) { return c.at(field).is_null() ? empty : c.at(field).get<float>(); };
    const auto a = c.at("a").get<Floats>(), b = c.at("b").get<Floats>();
    const Floats a_lse{lse_of("a_lse")}, b_lse{lse_of("b_lse")};
    Floats out(2), lse(1);
    const auto state = [](const Floats& values, const Floats& value_lse) {
      return AttentionStateView{{values.data(), DType::kFloat32, {1, 1, 2}}, value_lse.data(), 1, 1, LseBase::k2};
    };
    merge_state(context, state(a, a_lse), state(b, b_lse), {out.data(), DType::kFloat32, {1, 1, 2}},
                {lse.data(), 1, 1, LseBase::k2});
    EXPECT_EQ(out, c.at("out").get<Floats>());
    EXPECT_EQ(lse[0], lse_of("lse"));
  }
}

class TokenPoolWindowLists : public ::testing::TestWithParam<GoldenCase> {};

/// Which keys each wrapper's lists hold.
TEST_P(TokenPoolWindowLists, HoldTheWindow) {
  const GoldenCase& c = GetParam();
  const Ints seq_lens = c.ints("seq"), prefix = c.value("prefix", Ints{});
  const int32_t page_size = c.value("page_size", 1);
  Ints table(seq_lens.size() * 16), rows(seq_lens.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::iota(table.begin(), table.end(), page_size);
  TokenPoolConfig config;
  config.num_heads = config.num_kv_heads = 1;
  config.head_dim = 8;
  config.q_dtype = config.kv_cache_dtype = DType::kFloat32;
  config.page_size = page_size;
  config.max_context_len = 16;
  config.req_to_token = dense_table(table, static_cast<int32_t>(rows.size()), 16);
  config.max_req_pool_size = static_cast<int32_t>(rows.size());
  config.sliding_window_size = c.at<int32_t>("window");
  config.extend_path = c.value("path", std::string()) == "ragged" ? ExtendPath::kRagged : ExtendPath::kPaged;
  TokenPoolBackend backend(Context::cpu(), config);
  ForwardBatch batch;
  const auto mode = c.at<std::string>("mode");
  batch.forward_mode = mode == "decode"   ? ForwardMode::kDecode
                       : mode == "extend" ? ForwardMode::kExtend
                                          : ForwardMode::kTargetVerify;
  batch.batch_size = static_cast<int32_t>(rows.size());
  batch.req_pool_indices = rows;
  batch.seq_lens = seq_lens;
  batch.extend_prefix_lens = prefix;
  batch.spec_info.draft_token_num = c.value("drafts", 0);
  backend.init_forward_metadata(batch);
  const auto* decode = std::get_if<DecodeMetadata>(&backend.forward_metadata());
  const auto wrappers = decode != nullptr ? decode->decode_wrappers
                                          : std::get<PrefillMetadata>(backend.forward_metadata()).prefill_wrappers;
  const KvWrapper& lists = wrappers[c.value("wrapper", size_t{0})];
  EXPECT_EQ(Ints(lists.kv_lens.begin(), lists.kv_lens.end()), c.ints("lens"));
  EXPECT_EQ(Ints(lists.kv_starts.begin(), lists.kv_starts.end()), c.ints("starts"));
  const Ints last = c.value("last_page_len", Ints(rows.size(), 1));
  EXPECT_EQ(Ints(lists.kv_last_page_len.begin(), lists.kv_last_page_len.end()), last);
}
INSTANTIATE_TEST_SUITE_P(Data, TokenPoolWindowLists,
                         ::testing::ValuesIn(golden_cases("token_pool/backend", "window_lists")),
                         folio::testing::golden_case_name);

TEST(ShouldUseTensorCore, FollowsPymllmsRule) {
  for (const GoldenCase& c : golden_cases("token_pool/backend", "tensor_core")) {
    SCOPED_TRACE(c.data.dump());
    const Ints heads = c.ints("heads");
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      EXPECT_EQ(should_use_tensor_core(dtype, heads[0], heads[1]), c.at<bool>("16_bit"));
    }
    for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      EXPECT_TRUE(should_use_tensor_core(dtype, heads[0], heads[1]));
    }
    EXPECT_FALSE(should_use_tensor_core(DType::kFloat32, heads[0], heads[1]));
    EXPECT_TRUE(should_use_tensor_core(DType::kFloat32, heads[0], heads[1], true));
    EXPECT_FALSE(should_use_tensor_core(DType::kFloat8E4M3, heads[0], heads[1], false));
  }
  EXPECT_THROW(should_use_tensor_core(DType::kFloat16, 4, 0), Error);
}

TEST(CaptureBatchSizes, AreTheGoldenOnes) {
  for (const GoldenCase& c : golden_cases("token_pool/backend", "capture_sizes")) {
    SCOPED_TRACE(c.data.dump());
    const Ints sizes = capture_batch_sizes(c.at<int32_t>("max"));
    if (c.data.contains("sizes")) {
      EXPECT_EQ(sizes, c.ints("sizes"));
      continue;
    }
    EXPECT_EQ(sizes.size(), c.at<size_t>("count"));
    EXPECT_EQ(Ints(sizes.end() - 4, sizes.end()), c.ints("last"));
  }
  EXPECT_THROW(capture_batch_sizes(0), Error);
}

}  // namespace
}  // namespace folio::inline v0::backends
