#include "rank_layer.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "replay/memory.hpp"
#include "replay/step_array.hpp"

namespace folio::cli {
namespace {

using distributed::DcpConfig;
using distributed::ProcessGroup;
using replay::MappedMemory;
using replay::StackConfig;

AttentionConfig attention_of(const Context& context, const StackConfig& stack, int32_t num_q_heads) {
  AttentionConfig attention;
  attention.num_q_heads = num_q_heads;
  attention.num_kv_heads = stack.num_kv_heads;
  attention.head_dim_qk = stack.head_dim_qk;
  attention.head_dim_v = stack.head_dim_v;
  attention.q = stack.q;
  attention.kv = stack.kv;
  attention.out = stack.out();
  attention.page_size = stack.page_size;
  attention.determinism = stack.determinism;
  attention.window_left = stack.window_left;
  if (stack.logits_soft_cap != 0.0f) attention.features = Feature::kSoftCap;
  attention.kv_format = replay::choose_format(stack.layout, attention, context);
  return attention;
}

/// One rank's shard of every request, in pages of a random order.
class Shard {
 public:
  Shard(const Context& context, const AttentionConfig& attention, bool hnd, int32_t requests, int32_t tokens)
      : arrays_{replay::StepArray(context), replay::StepArray(context)} {
    const int32_t pages_each = std::max(1, (tokens + attention.page_size - 1) / attention.page_size);
    const int64_t num_pages = int64_t{pages_each} * requests;
    const KvCacheShape shape{
        num_pages,   attention.page_size, attention.num_kv_heads, attention.head_dim_qk, attention.head_dim_v,
        attention.kv};
    const size_t k_bytes = static_cast<size_t>(k_elements(shape)) * static_cast<size_t>(size_of(attention.kv));
    const size_t v_bytes = static_cast<size_t>(v_elements(shape)) * static_cast<size_t>(size_of(attention.kv));
    pool_ = MappedMemory::of_cache_on(context, k_bytes + v_bytes);
    // Pages of a CPU that nobody has written are all one page of zeros. The pattern is a finite value of every dtype.
    constexpr int kPattern = 0x3c;
    if (!replay::gpu::is_gpu(context)) std::memset(pool_.data(), kPattern, pool_.bytes());
    std::byte* const k = pool_.data();
    const bool packed = attention.kv_format == KvFormat::kCpuPacked;
    cache_ = packed ? make_cpu_packed_view(shape, k, k + k_bytes)
             : hnd  ? make_hnd_view(shape, k, k + k_bytes)
                    : make_nhd_view(shape, k, k + k_bytes);
    pages_.resize(static_cast<size_t>(num_pages));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937_64(1));
    for (int32_t r = 0; r <= requests; ++r) indptr_.push_back(r * pages_each);
    const auto indices = arrays_[0].place(std::span<const int32_t>(pages_));
    table_.kind = PageTableKind::kCsr;
    table_.indices = indices.data();
    table_.num_indices = static_cast<int64_t>(indices.size());
    table_.indptr = arrays_[1].place(std::span<const int32_t>(indptr_)).data();
    table_.num_rows = requests;
  }
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;
  const KvCacheView& cache() const { return cache_; }
  const PageTableView& table() const { return table_; }

 private:
  std::array<replay::StepArray, 2> arrays_;
  std::vector<int32_t> pages_, indptr_;
  MappedMemory pool_;
  KvCacheView cache_;
  PageTableView table_;
};

/// [tokens, heads, dim] of its own.
class Rows {
 public:
  Rows(const Context& context, DType dtype, int64_t tokens, int64_t heads, int64_t dim)
      : memory_(MappedMemory::on(context, static_cast<size_t>(tokens * heads * dim * size_of(dtype)))),
        view_(memory_.data(), dtype, {tokens, heads, dim}) {}
  ConstTensorView in() const { return {view_.data, view_.dtype, {view_.shape[0], view_.shape[1], view_.shape[2]}}; }
  TensorView out() const { return view_; }

 private:
  MappedMemory memory_;
  TensorView view_;
};

/// What both kinds of arguments have.
template <typename Args>
void set_args(Args& args, const Rows& q, const Rows& out, const Shard& shard, const StackConfig& stack) {
  args.q = q.in();
  args.out = out.out();
  args.cache = shard.cache();
  args.table = shard.table();
  args.k_scale = args.v_scale = replay::cache_scale(stack.kv);
  args.logits_soft_cap = stack.logits_soft_cap;
}

/// Lengths of the whole batch.
struct Lengths {
  explicit Lengths(const BenchShape& shape) : seq_lens(static_cast<size_t>(shape.batch), shape.kv_len) {
    for (int32_t r = 0; r <= shape.batch; ++r) cu_q.push_back(r * shape.q_len);
  }
  std::vector<int32_t> cu_q, seq_lens;
};

/// Ranks divide the heads of the queries.
class DcpLayer final : public RankLayer {
 public:
  DcpLayer(const Context& context, ProcessGroup& group, const StackConfig& stack, const RanksOptions& options,
           const BenchShape& shape)
      : layer_(context, group, config_of(context, group, stack, options, shape)),
        shard_(context, layer_.config().attention, stack.layout == replay::KvLayout::kStridedHnd, shape.batch,
               shard_len(shape.kv_len, group.size(), group.rank(), options.interleave)),
        q_(rows(context, stack.q, stack.head_dim_qk, shape)),
        out_(rows(context, stack.out(), stack.head_dim_v, shape)) {
    const Lengths lengths(shape);
    distributed::DcpBatch batch;
    batch.num_requests = batch.num_cached = shape.batch;
    batch.cu_q = lengths.cu_q.data();
    batch.seq_lens = lengths.seq_lens.data();
    plan_ = layer_.plan(batch);
    workspace_ = MappedMemory::on(context, layer_.workspace_size(plan_));
    set_args(args_, q_, out_, shard_, stack);
  }
  void run(Stream stream) override { layer_.run(plan_, args_, {workspace_.data(), workspace_.bytes()}, stream); }
  std::string kernel_name() const override { return layer_.cached_op().kernel_name(); }
  bool over_peer_memory() const override { return plan_.over_peer_memory; }

 private:
  static DcpConfig config_of(const Context& context, const ProcessGroup& group, const StackConfig& stack,
                             const RanksOptions& options, const BenchShape& shape) {
    DcpConfig config;
    config.attention = attention_of(context, stack, stack.num_q_heads / group.size());
    config.interleave = options.interleave;
    config.combine = options.combine;
    config.transport = options.transport;
    config.partial_dtype = options.partial_dtype;
    if (options.graph) config.bounds = {shape.batch, shape.batch * shape.q_len, shape.q_len, shape.kv_len, 0};
    return config;
  }
  Rows rows(const Context& context, DType dtype, int32_t dim, const BenchShape& shape) const {
    return {context, dtype, int64_t{shape.batch} * shape.q_len, layer_.config().attention.num_q_heads, dim};
  }

  distributed::DcpAttention layer_;
  Shard shard_;
  Rows q_, out_;
  distributed::DcpArgs args_;
  distributed::DcpPlan plan_;
  MappedMemory workspace_;
};

/// Ranks divide the queries themselves.
class PcpLayer final : public RankLayer {
 public:
  PcpLayer(const Context& context, ProcessGroup& group, const StackConfig& stack, const RanksOptions& options,
           const BenchShape& shape)
      : layer_(context, group, config_of(context, stack, options)),
        shard_(context, layer_.config().attention, stack.layout == replay::KvLayout::kStridedHnd, shape.batch,
               shard_len(shape.kv_len, group.size(), group.rank(), options.interleave)),
        plan_(plan_of(layer_, shape)),
        q_(context, stack.q, plan_.num_tokens, stack.num_q_heads, stack.head_dim_qk),
        k_(context, layer_.config().attention.ragged_kv, plan_.num_tokens, stack.num_kv_heads, stack.head_dim_qk),
        v_(context, layer_.config().attention.ragged_kv, plan_.num_tokens, stack.num_kv_heads, stack.head_dim_v),
        out_(context, stack.out(), plan_.num_tokens, stack.num_q_heads, stack.head_dim_v),
        workspace_(MappedMemory::on(context, layer_.workspace_size(plan_))) {
    set_args(args_, q_, out_, shard_, stack);
    args_.k = k_.in();
    args_.v = v_.in();
  }
  void run(Stream stream) override { layer_.run(plan_, args_, {workspace_.data(), workspace_.bytes()}, stream); }
  std::string kernel_name() const override { return layer_.fresh_op().kernel_name(); }

 private:
  static distributed::PcpConfig config_of(const Context& context, const StackConfig& stack,
                                          const RanksOptions& options) {
    distributed::PcpConfig config;
    config.attention = attention_of(context, stack, stack.num_q_heads);
    config.interleave = options.interleave;
    config.exchange = options.exchange;
    return config;
  }
  static distributed::PcpPlan plan_of(distributed::PcpAttention& layer, const BenchShape& shape) {
    const Lengths lengths(shape);
    distributed::PcpBatch batch;
    batch.num_requests = shape.batch;
    batch.cu_q = lengths.cu_q.data();
    batch.seq_lens = lengths.seq_lens.data();
    return layer.plan(batch);
  }

  distributed::PcpAttention layer_;
  Shard shard_;
  distributed::PcpPlan plan_;
  Rows q_, k_, v_, out_;
  MappedMemory workspace_;
  distributed::PcpArgs args_;
};

}  // namespace

std::unique_ptr<RankLayer> make_rank_layer(const Context& context, ProcessGroup& group, const StackConfig& stack,
                                           const RanksOptions& options, const BenchShape& shape) {
  if (options.divide_queries) return std::make_unique<PcpLayer>(context, group, stack, options, shape);
  return std::make_unique<DcpLayer>(context, group, stack, options, shape);
}

}  // namespace folio::cli
