#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "folio/backends/token_pool.hpp"
#include "folio/backends/token_pool/draft_kv_indices.hpp"
#include "folio/page_table.hpp"
#include "folio/pools.hpp"
#include "folio/reference.hpp"

namespace folio::inline v0::backends {
namespace {

using Ints = std::vector<int32_t>;

/// A draft model of one layer: requests that go on along topk branches.
class DraftModel {
 public:
  static constexpr int32_t kDim = 8, kSlots = 64, kColumns = 32, kTopk = 2, kSteps = 3;

  DraftModel() {
    std::mt19937 random(3);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (std::vector<float>* values : {&k_, &v_}) {
      values->resize(kSlots * kDim);
      for (float& value : *values) value = uniform(random);
    }
    q_.resize(2 * kTopk * kDim);
    for (float& value : q_) value = uniform(random);
    table_.assign(3 * kColumns, 0);
    for (int32_t row = 1; row < 3; ++row) {
      for (int32_t p = 0; p < kColumns; ++p)
        table_[static_cast<size_t>(row * kColumns + p)] = (row * 31 + p * 7) % kSlots;
    }
    std::vector<int64_t> slots(kSlots);
    for (int64_t slot = 0; slot < kSlots; ++slot) slots[static_cast<size_t>(slot)] = slot;
    write_kv_cache(context, pool.write_args(0, {k_.data(), DType::kFloat32, {kSlots, kDim}},
                                            {v_.data(), DType::kFloat32, {kSlots, kDim}}, slots));
  }

  TokenPoolConfig config(std::span<int32_t> kv_indptr_buf, std::span<int32_t> last_page_buf) const {
    TokenPoolConfig config;
    config.num_heads = config.num_kv_heads = 1;
    config.head_dim = kDim;
    config.q_dtype = config.kv_cache_dtype = DType::kFloat32;
    config.max_context_len = kColumns;
    config.req_to_token = dense_table(table_, 3, kColumns);
    config.max_req_pool_size = 2 * kTopk;
    config.skip_prefill = true;
    config.kv_indptr_buf = kv_indptr_buf;
    config.kv_last_page_len_buf = last_page_buf;
    return config;
  }

  /// What branch `branch` of request `request` sees at step t: its tokens, then its first t drafts.
  std::string wrong(const std::vector<float>& out, const Ints& rows, const Ints& lens, int32_t t) const {
    AttentionConfig attention;
    attention.num_q_heads = attention.num_kv_heads = 1;
    attention.head_dim_qk = attention.head_dim_v = kDim;
    attention.mask = MaskKind::kNone;
    for (size_t request = 0; request < rows.size(); ++request) {
      for (int32_t branch = 0; branch < kTopk; ++branch) {
        std::vector<float> k, v;
        const auto take = [&](int32_t position) {
          const auto slot = static_cast<size_t>(table_[static_cast<size_t>(rows[request] * kColumns + position)]);
          k.insert(k.end(), k_.begin() + static_cast<std::ptrdiff_t>(slot * kDim),
                   k_.begin() + static_cast<std::ptrdiff_t>((slot + 1) * kDim));
          v.insert(v.end(), v_.begin() + static_cast<std::ptrdiff_t>(slot * kDim),
                   v_.begin() + static_cast<std::ptrdiff_t>((slot + 1) * kDim));
        };
        for (int32_t p = 0; p < lens[request]; ++p) take(p);
        for (int32_t i = 0; i < t; ++i) take(lens[request] + branch * kSteps + i);
        const auto keys = static_cast<int32_t>(k.size()) / kDim;
        const Ints cu_q{0, 1}, indptr{0, keys};
        KvSegment segment;
        segment.source = KvSource::kRagged;
        segment.kv_len = &keys;
        BatchView batch;
        batch.num_requests = batch.num_tokens = 1;
        batch.cu_q = cu_q.data();
        batch.segments = {&segment, 1};
        SegmentArgs ragged;
        ragged.ragged = {
            {k.data(), DType::kFloat32, {keys, 1, kDim}}, {v.data(), DType::kFloat32, {keys, 1, kDim}}, indptr.data()};
        const size_t row = request * kTopk + static_cast<size_t>(branch);
        AttentionArgs args;
        args.q = {q_.data() + row * kDim, DType::kFloat32, {1, 1, kDim}};
        args.segments = {&ragged, 1};
        std::vector<double> expected(kDim);
        verify::reference_row(attention, batch, args, 0, 0, expected);
        for (size_t d = 0; d < kDim; ++d) {
          if (!(std::abs(out[row * kDim + d] - expected[d]) < 1e-5)) return "row " + std::to_string(row) + " is wrong";
        }
      }
    }
    return {};
  }

  Context context = Context::cpu();
  KvPool pool{KvPoolConfig{.num_slots = kSlots,
                           .num_layers = 1,
                           .num_kv_heads = 1,
                           .head_dim_qk = kDim,
                           .head_dim_v = kDim,
                           .dtype = DType::kFloat32}};
  Ints table_;
  std::vector<float> k_, v_, q_;
};

/// One backend a step, all of them over one kv_indptr matrix, one kv_last_page_len and one workspace; eager and
/// captured.
TEST(TokenPoolDrafts, StepsShareBuffers) {
  DraftModel model;
  const Ints rows{2, 1}, lens{5, 9};
  constexpr int32_t kRows = 2 * DraftModel::kTopk;
  constexpr int64_t kCapacity = kRows * DraftModel::kColumns;
  Ints indptr((DraftModel::kSteps - 1) * (kRows + 1), -1), indices((DraftModel::kSteps - 1) * kCapacity),
      ones(kRows, 1);
  generate_draft_decode_kv_indices({dense_table(model.table_, 3, DraftModel::kColumns),
                                    rows,
                                    lens,
                                    {},
                                    {DraftModel::kTopk, DraftModel::kSteps, 1},
                                    DraftModel::kSteps - 1,
                                    DraftModel::kSlots},
                                   {indptr, kRows + 1, indices, kCapacity});
  const auto workspace = std::make_shared<TokenPoolWorkspace>(model.context);
  for (int32_t t = 1; t < DraftModel::kSteps; ++t) {
    const auto row = std::span(indptr).subspan(static_cast<size_t>(t - 1) * (kRows + 1), kRows + 1);
    const auto list = std::span(indices).subspan(static_cast<size_t>(t - 1) * kCapacity, kCapacity);
    TokenPoolConfig config = model.config(row, ones);
    config.workspace = workspace;
    TokenPoolBackend backend(model.context, config);
    ForwardBatch batch;
    batch.forward_mode = ForwardMode::kDecode;
    batch.batch_size = 2;
    batch.seq_lens = lens;
    batch.spec_info.kv_indptr = row;
    batch.spec_info.kv_indices = list;
    batch.token_to_kv_pool = &model.pool;
    const RadixAttention layer{1, DraftModel::kDim, 0.0f, 1, 0};
    std::vector<float> out(kRows * DraftModel::kDim);
    const TensorView out_view(out.data(), DType::kFloat32, {kRows, DraftModel::kDim});
    const ConstTensorView q(model.q_.data(), DType::kFloat32, {kRows, DraftModel::kDim});
    backend.init_forward_metadata(batch);
    const KvWrapper& lists = std::get<DecodeMetadata>(backend.forward_metadata()).decode_wrappers[0];
    EXPECT_EQ(lists.kv_indptr.data(), row.data());
    EXPECT_EQ(lists.kv_last_page_len.data(), ones.data());
    layer.forward(backend, q, {}, {}, batch, out_view);
    EXPECT_EQ(model.wrong(out, rows, lens, t), "");
    std::ranges::fill(out, -1.0f);
    backend.init_cuda_graph_state(2, kRows, list);
    GraphBatchExtras extras;
    extras.spec_info = batch.spec_info;
    backend.init_forward_metadata_capture_cuda_graph(2, kRows, {}, lens, ForwardMode::kDecode, extras);
    backend.init_forward_metadata_replay_cuda_graph(2, {}, lens, 14, ForwardMode::kDecode, lens, extras);
    layer.forward(backend, q, {}, {}, batch, out_view);
    EXPECT_EQ(model.wrong(out, rows, lens, t), "");
  }
  EXPECT_EQ(ones, Ints(kRows, 1));
}

/// A backend's own decodes go to the buffers it was given, too.
TEST(TokenPoolDrafts, GivenBuffersAreUsed) {
  DraftModel model;
  Ints indptr(5, -1), ones(4, 1);
  TokenPoolBackend backend(model.context, model.config(indptr, ones));
  const Ints rows{2, 1}, lens{5, 9};
  ForwardBatch batch;
  batch.forward_mode = ForwardMode::kDecode;
  batch.batch_size = 2;
  batch.req_pool_indices = rows;
  batch.seq_lens = lens;
  backend.init_forward_metadata(batch);
  EXPECT_EQ(indptr, (Ints{0, 5, 14, -1, -1}));
}

}  // namespace
}  // namespace folio::inline v0::backends
