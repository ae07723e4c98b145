// Lists of slots and masks of the token pool mean, in attention, what they are made for: by the float64 oracle, every
// query's result is that of its own path of tokens, listed by hand. Both sum the same terms in the same order, so that
// results are equal to the last bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "folio/backends/token_pool/draft_kv_indices.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"
#include "folio/backends/token_pool/kv_indices.hpp"
#include "folio/folio.hpp"
#include "folio/reference.hpp"

namespace folio::inline v0::backends {
namespace {

using Ints = std::vector<int32_t>;

constexpr int32_t kHeads = 2;
constexpr int32_t kDim = 8;
constexpr int32_t kSlots = 96;
constexpr int32_t kColumns = 24;

/// A pool of random keys and values, three rows of shuffled slots, and queries.
struct Pool {
  Pool() : k(kSlots * kDim), v(k.size()), q(64 * kHeads * kDim), table(4 * kColumns) {
    std::mt19937 random(17);
    std::normal_distribution<float> normal;
    for (auto* values : {&k, &v, &q}) {
      for (float& value : *values) value = normal(random);
    }
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin() + kColumns, table.end(), random);
  }

  int32_t slot(int32_t row, int32_t position) const { return table[static_cast<size_t>(row * kColumns + position)]; }
  PageTableView req_to_token() const { return dense_table(table, 4, kColumns); }

  std::vector<float> k, v, q;
  Ints table;
};

AttentionConfig config_of(MaskKind mask, int32_t window_left) {
  AttentionConfig config;
  config.num_q_heads = kHeads;
  config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_v = kDim;
  config.q = config.kv = DType::kFloat32;
  config.page_size = 1;
  config.mask = mask;
  config.window_left = window_left;
  return config;
}

/// A row of output and its LSE.
struct Row {
  std::vector<double> out = std::vector<double>(kDim);
  double lse = 0;
};

/// A batch over the pool with a table, one segment.
struct Attention {
  Attention(Pool& pool, const AttentionConfig& attention_config, const Ints& cu_q, const Ints& kv_len,
            const PageTableView& table, const int32_t* first_pos = nullptr)
      : config(attention_config) {
    segment.kv_len = kv_len.data();
    segment.first_pos = first_pos;
    batch.num_requests = static_cast<int32_t>(kv_len.size());
    batch.num_tokens = cu_q.back();
    batch.cu_q = cu_q.data();
    batch.segments = {&segment, 1};
    segment_args.cache = make_nhd_view({kSlots, 1, 1, kDim, kDim, DType::kFloat32}, pool.k.data(), pool.v.data());
    segment_args.table = table;
    args.q = ConstTensorView(pool.q.data(), DType::kFloat32, {batch.num_tokens, kHeads, kDim});
    args.segments = {&segment_args, 1};
  }

  Row row(int32_t token, int32_t head) const {
    Row row;
    row.lse = verify::reference_row(config, batch, args, token, head, row.out);
    return row;
  }

  AttentionConfig config;
  KvSegment segment;
  SegmentArgs segment_args;
  BatchView batch;
  AttentionArgs args;
};

/// What query `token` sees of exactly these slots.
Row row_of_path(Pool& pool, const Ints& slots, int32_t token, int32_t head) {
  const Ints cu_q = {0, 1}, kv_len = {static_cast<int32_t>(slots.size())}, indptr = {0, kv_len[0]};
  Attention attention(pool, config_of(MaskKind::kNone, -1), cu_q, kv_len, csr_table(slots, indptr));
  attention.args.q = ConstTensorView(pool.q.data() + token * kHeads * kDim, DType::kFloat32, {1, kHeads, kDim});
  return attention.row(0, head);
}

void expect_equal(const Row& a, const Row& b) {
  EXPECT_DOUBLE_EQ(a.lse, b.lse);
  for (size_t d = 0; d < a.out.size(); ++d) EXPECT_DOUBLE_EQ(a.out[d], b.out[d]);
}

TEST(TokenPoolLists, VerifiedNodesSeeTheirPaths) {
  Pool pool;
  constexpr int32_t kNodes = 6;
  const Ints parents = {-1, 0, 0, 1, 1, 3, -1, 0, 1, 2, 2, 0}, seq_lens = {5, 17}, rows = {3, 1};
  const Ints kv_len = {5 + kNodes, 17 + kNodes}, cu_q = {0, kNodes, 2 * kNodes}, tail_len = {kNodes, kNodes};
  Ints indptr(3), indices(static_cast<size_t>(kv_indptr_from_lens(kv_len, 1, indptr)));
  create_kv_indices({pool.req_to_token(), rows, kv_len, indptr, {}, 1, kSlots}, indices);
  struct Form {
    TreeMaskForm form;
    int32_t window_left;
  };
  for (const auto& [form, window] : {Form{TreeMaskForm::kFullBits, -1}, Form{TreeMaskForm::kTailBits, -1},
                                     Form{TreeMaskForm::kFullBits, 1}, Form{TreeMaskForm::kFullBits, 7}}) {
    std::vector<uint8_t> mask(static_cast<size_t>(tree_mask_bytes(form, seq_lens, kNodes)));
    fill_tree_mask(form, parents, seq_lens, kNodes, mask, window);
    Attention attention(pool, config_of(MaskKind::kCustom, -1), cu_q, kv_len, csr_table(indices, indptr));
    const bool tail = form == TreeMaskForm::kTailBits;
    attention.batch.custom_mask.scope = tail ? CustomMaskScope::kTail : CustomMaskScope::kAll;
    if (tail) attention.batch.custom_mask.tail_len = tail_len.data();
    attention.args.custom_mask = mask.data();
    attention.args.custom_mask_bytes = static_cast<int64_t>(mask.size());
    // The forms' sizes are those that attention asks for.
    const AttentionOp op = prepare(Context::cpu(), attention.config);
    PlanBuffer buffer = make_plan_buffer(op);
    EXPECT_NO_THROW(plan(op, attention.batch, buffer));
    for (int32_t token = 0; token < 2 * kNodes; ++token) {
      const auto r = static_cast<size_t>(token / kNodes);
      Ints path;
      for (int32_t a = token % kNodes; a >= 0; a = parents[r * kNodes + static_cast<size_t>(a)]) {
        path.insert(path.begin(), pool.slot(rows[r], seq_lens[r] + a));
      }
      for (int32_t p = seq_lens[r] - 1; p >= 0; --p) path.insert(path.begin(), pool.slot(rows[r], p));
      const auto kept = std::min(path.size(), window < 0 ? path.size() : static_cast<size_t>(window) + 1);
      path.erase(path.begin(), path.end() - static_cast<int64_t>(kept));
      for (int32_t head = 0; head < kHeads; ++head) {
        SCOPED_TRACE(token);
        expect_equal(attention.row(token, head), row_of_path(pool, path, token, head));
      }
    }
  }
}

TEST(TokenPoolLists, DraftBranchesSeeTheirOwnTokens) {
  Pool pool;
  const DraftBranches branches{2, 3, 1};
  const Ints lens = {4, 9}, rows = {2, 3};
  Ints indptr(2 * 5), indices(static_cast<size_t>(2 * draft_kv_indices_len(13, 2, branches, 2)));
  const auto stride = static_cast<int64_t>(indices.size()) / 2;
  generate_draft_decode_kv_indices({pool.req_to_token(), rows, lens, {}, branches, 2, kSlots},
                                   {indptr, 5, indices, stride});
  for (int32_t step = 1; step <= 2; ++step) {
    const Ints cu_q = {0, 1, 2, 3, 4};
    Ints kv_len;
    for (size_t i = 0; i < 4; ++i) kv_len.push_back(lens[i / 2] + step);
    const Ints offsets(indptr.begin() + (step - 1) * 5, indptr.begin() + step * 5);
    const Ints slots(indices.begin() + (step - 1) * stride, indices.begin() + step * stride);
    const Attention attention(pool, config_of(MaskKind::kCausal, -1), cu_q, kv_len, csr_table(slots, offsets));
    for (int32_t token = 0; token < 4; ++token) {
      const auto r = static_cast<size_t>(token / 2);
      Ints path;
      for (int32_t p = 0; p < lens[r]; ++p) path.push_back(pool.slot(rows[r], p));
      for (int32_t t = 0; t < step; ++t) path.push_back(pool.slot(rows[r], lens[r] + token % 2 * 3 + t));
      for (int32_t head = 0; head < kHeads; ++head) {
        expect_equal(attention.row(token, head), row_of_path(pool, path, token, head));
      }
    }
  }
}

/// Queries over lists cut off in front give what a window over whole rows gives.
TEST(TokenPoolLists, WindowsCutOffWhatNobodySees) {
  Pool pool;
  const Ints rows = {1, 2, 3}, seq_lens = {3, 5, 20}, prefix_lens = {2, 1, 17}, cu_q = {0, 1, 5, 8},
             whole = {0, 24, 48, 72};
  for (int32_t window : {0, 1, 4, 30}) {
    Ints lens(3), starts(3), indptr(4);
    window_kv_ranges(seq_lens, prefix_lens, window, 1, lens, starts);
    Ints indices(static_cast<size_t>(kv_indptr_from_lens(lens, 1, indptr)));
    create_kv_indices({pool.req_to_token(), rows, lens, indptr, starts, 1, kSlots}, indices);
    const AttentionConfig config = config_of(MaskKind::kCausal, window);
    const Ints all(pool.table.begin() + kColumns, pool.table.end());
    const Attention cut(pool, config, cu_q, lens, csr_table(indices, indptr), starts.data());
    const Attention full(pool, config, cu_q, seq_lens, csr_table(all, whole));
    for (int32_t token = 0; token < 8; ++token) expect_equal(cut.row(token, 1), full.row(token, 1));
    // A decode needs no mask: the list is the window.
    window_kv_ranges(seq_lens, {}, window, 1, lens, starts);
    for (size_t r = 0; r < 3; ++r) {
      Ints path;
      for (int32_t j = 0; j < lens[r]; ++j) path.push_back(pool.slot(rows[r], starts[r] + j));
      const int32_t last = cu_q[r + 1] - 1;
      expect_equal(full.row(last, 0), row_of_path(pool, path, last, 0));
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
