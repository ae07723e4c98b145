#include "distributed/pcp_case_test_util.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/aligned_buffer.hpp"
#include "folio/kv_cache.hpp"

namespace folio::inline v0::distributed::testing {
namespace {

constexpr int32_t kPaddingRows = 2;
constexpr std::byte kNanByte{0xff};  // NaN in every dtype
constexpr std::byte kUntouched{0x5a};

DcpSetup whole_setup(const PcpSetup& setup) {
  DcpSetup whole = setup.whole;
  whole.write_new_tokens = false;
  whole.num_cached = 0;
  return whole;
}

/// Some rows of a packed tensor, and behind them padding.
std::vector<std::byte> rows_of(const std::vector<std::byte>& all, const std::vector<int32_t>& rows, int32_t padded,
                               int64_t bytes) {
  std::vector<std::byte> some;
  for (const int32_t row : rows) some.insert(some.end(), all.begin() + row * bytes, all.begin() + (row + 1) * bytes);
  some.resize(static_cast<size_t>((padded + kPaddingRows) * bytes), kNanByte);
  return some;
}

}  // namespace

PcpCase::PcpCase(const PcpSetup& given, uint32_t seed) : setup(given), whole(whole_setup(given), seed) {
  const DcpSetup& s = whole.setup;
  ranks.resize(static_cast<size_t>(world()));
  for (int32_t r = 0; r < world(); ++r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    std::vector<int32_t> local(whole.cu_q.size());
    pcp_local_cu_q(whole.cu_q, world(), r, local);
    rank.num_tokens = local.back();
    rank.rows = std::max(rank.num_tokens, setup.max_tokens);
    rank.tokens.resize(static_cast<size_t>(rank.num_tokens));
    pcp_tokens(whole.cu_q, world(), r, rank.tokens);
    const DcpCase::Rank& all = whole.ranks[0];
    rank.q = rows_of(all.q, rank.tokens, rank.rows, int64_t{s.heads} * s.dim_qk * size_of(whole.query_dtype()));
    rank.k = rows_of(all.k, rank.tokens, rank.rows, int64_t{s.kv_heads} * s.dim_qk * size_of(s.model));
    rank.v = rows_of(all.v, rank.tokens, rank.rows, int64_t{s.kv_heads} * s.dim_v * size_of(s.model));
  }
}

PcpConfig PcpCase::config() const {
  PcpConfig config;
  config.attention = whole.config().attention;
  config.attention.ragged_kv = setup.whole.model;
  if (setup.packed) config.attention.kv_format = KvFormat::kCpuPacked;
  config.interleave = setup.whole.interleave;
  config.exchange = setup.exchange;
  config.bounds = setup.bounds;
  return config;
}

PcpBatch PcpCase::batch() const {
  PcpBatch batch;
  batch.num_requests = static_cast<int32_t>(whole.seq_lens.size());
  batch.cu_q = whole.cu_q.data();
  batch.seq_lens = whole.seq_lens.data();
  batch.max_tokens = setup.max_tokens;
  return batch;
}

KvCacheView PcpCase::packed_view(int32_t r) {
  Rank& rank = ranks[static_cast<size_t>(r)];
  const KvCacheView strided = whole.args(r).cache;
  const KvCacheShape shape{strided.num_pages,   strided.page_size,  strided.num_kv_heads,
                           strided.head_dim_qk, strided.head_dim_v, strided.dtype};
  const auto k_bytes = static_cast<size_t>(k_elements(shape) * size_of(shape.dtype));
  rank.packed.resize(k_bytes + static_cast<size_t>(v_elements(shape) * size_of(shape.dtype)));
  const KvCacheView view = make_cpu_packed_view(shape, rank.packed.data(), rank.packed.data() + k_bytes);
  std::vector<int32_t> pages(static_cast<size_t>(shape.num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  convert_pages(Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}}), strided, view, pages, pages);
  return view;
}

PcpArgs PcpCase::args(int32_t r) {
  const DcpSetup& s = whole.setup;
  Rank& rank = ranks[static_cast<size_t>(r)];
  const DcpArgs shared = whole.args(r);
  const int64_t rows = rank.rows + kPaddingRows;
  PcpArgs args;
  args.q = ConstTensorView(rank.q.data(), whole.query_dtype(), {rows, s.heads, s.dim_qk});
  args.k = ConstTensorView(rank.k.data(), s.model, {rows, s.kv_heads, s.dim_qk});
  args.v = ConstTensorView(rank.v.data(), s.model, {rows, s.kv_heads, s.dim_v});
  args.cache = setup.packed ? packed_view(r) : shared.cache;
  args.table = shared.table;
  args.k_scale = shared.k_scale;
  args.v_scale = shared.v_scale;
  args.q_scale = shared.q_scale;
  rank.out.assign(static_cast<size_t>(rows * s.heads * s.dim_v * size_of(s.model)), kUntouched);
  rank.lse.assign(static_cast<size_t>(rows * s.heads), -77.0f);
  args.out = TensorView(rank.out.data(), s.model, {rows, s.heads, s.dim_v});
  args.lse = {rank.lse.data(), s.heads, 1, LseBase::kE};
  args.logits_soft_cap = s.soft_cap;
  args.alibi_slopes = s.alibi ? whole.ranks[0].slopes.data() : nullptr;
  args.sinks = s.sinks ? whole.ranks[0].sinks.data() : nullptr;
  return args;
}

void PcpCase::run(PcpAttention& attention) {
  const int32_t r = attention.group().rank();
  Rank& rank = ranks[static_cast<size_t>(r)];
  const PcpPlan plan = attention.plan(batch());
  rank.exchange = plan.exchange;
  core::AlignedBuffer workspace(attention.workspace_size(plan), core::AlignedBuffer::kWorkspaceAlignment);
  std::fill_n(workspace.as<float>(), workspace.bytes() / sizeof(float), std::numeric_limits<float>::quiet_NaN());
  attention.run(plan, args(r), {workspace.data(), workspace.bytes()});
  note_p_dtype(attention);
}

void PcpCase::note_p_dtype(const PcpAttention& attention) {
  if (attention.group().rank() != 0) return;
  DType& p_dtype = whole.ranks[0].p_dtype;
  for (const AttentionOp* op : {&attention.fresh_op(), &attention.shard_op(), &attention.gathered_op()}) {
    if (p_dtype == DType::kFloat32) p_dtype = op->p_dtype();
  }
}

void PcpCase::run(ProcessGroup& group, const Context& context) {
  PcpAttention attention(context, group, config());
  run(attention);
}

void PcpCase::run_in_threads() {
  run_ranks(world(), [&](ProcessGroup& group) {
    run(group, Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}}));
  });
}

std::string PcpCase::wrong_outputs() {
  const DcpSetup& s = whole.setup;
  const auto out_row = static_cast<std::ptrdiff_t>(s.heads * s.dim_v * size_of(s.model));
  whole.args(0);  // results that nobody writes
  DcpCase::Rank& all = whole.ranks[0];
  for (const Rank& rank : ranks) {
    const auto written = rank.rows * out_row;
    if (std::any_of(rank.out.begin() + written, rank.out.end(), [](std::byte b) { return b != kUntouched; })) {
      return s.name + ": padding rows were written";
    }
    for (size_t j = 0; j < rank.tokens.size(); ++j) {
      const auto row = static_cast<std::ptrdiff_t>(j);
      std::copy_n(rank.out.begin() + row * out_row, out_row, all.out.begin() + rank.tokens[j] * out_row);
      std::copy_n(rank.lse.begin() + row * s.heads, s.heads, all.lse.begin() + rank.tokens[j] * s.heads);
    }
  }
  const std::string wrong = whole.wrong_output(0);
  return wrong.empty() ? wrong : s.name + ": " + wrong;
}

}  // namespace folio::inline v0::distributed::testing
