#include "ranks_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "replay/memory.hpp"
#include "replay/step_array.hpp"

namespace folio::cli {
namespace {

using distributed::DcpArgs;
using distributed::DcpAttention;
using distributed::DcpConfig;
using distributed::DcpPlan;
using distributed::ProcessGroup;
using replay::MappedMemory;
using replay::StackConfig;

DcpConfig config_of(const Context& context, const StackConfig& stack, const RanksOptions& options, int32_t ranks) {
  DcpConfig config;
  AttentionConfig& attention = config.attention;
  attention.num_q_heads = stack.num_q_heads / ranks;
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
  config.interleave = options.interleave;
  config.combine = options.combine;
  return config;
}

/// One rank's layer: its shard of every request, in pages of a random order, and its queries.
class RankLayer {
 public:
  RankLayer(const Context& context, ProcessGroup& group, const StackConfig& stack, const DcpConfig& config,
            const BenchShape& shape)
      : shape_(shape),
        stack_(stack),
        layer_(context, group, config),
        arrays_{replay::StepArray(context), replay::StepArray(context)} {
    const AttentionConfig& attention = layer_.config().attention;
    make_cache(context, attention, shard_len(shape.kv_len, group.size(), group.rank(), config.interleave));
    const int64_t tokens = int64_t{shape.batch} * shape.q_len;
    const auto memory = [&](int64_t dim, DType dtype) {
      return MappedMemory::on(context, static_cast<size_t>(tokens * attention.num_q_heads * dim * size_of(dtype)));
    };
    q_ = memory(attention.head_dim_qk, attention.q);
    out_ = memory(attention.head_dim_v, attention.out);
    args_.q = ConstTensorView(q_.data(), attention.q, {tokens, attention.num_q_heads, attention.head_dim_qk});
    args_.out = TensorView(out_.data(), attention.out, {tokens, attention.num_q_heads, attention.head_dim_v});
    args_.k_scale = args_.v_scale = replay::cache_scale(attention.kv);
    args_.logits_soft_cap = stack.logits_soft_cap;
    for (int32_t r = 0; r <= shape.batch; ++r) cu_q_.push_back(r * shape.q_len);
    seq_lens_.assign(static_cast<size_t>(shape.batch), shape.kv_len);
    plan();
    workspace_ = MappedMemory::on(context, layer_.workspace_size(plan_));
  }

  void plan() {
    distributed::DcpBatch batch;
    batch.num_requests = batch.num_cached = shape_.batch;
    batch.cu_q = cu_q_.data();
    batch.seq_lens = seq_lens_.data();
    plan_ = layer_.plan(batch);
  }
  void run() { layer_.run(plan_, args_, {workspace_.data(), workspace_.bytes()}); }
  std::string kernel_name() const { return layer_.cached_op().kernel_name(); }

 private:
  void make_cache(const Context& context, const AttentionConfig& attention, int32_t tokens) {
    const int32_t pages_each = std::max(1, (tokens + attention.page_size - 1) / attention.page_size);
    const int64_t num_pages = int64_t{pages_each} * shape_.batch;
    const KvCacheShape cache{
        num_pages,   attention.page_size, attention.num_kv_heads, attention.head_dim_qk, attention.head_dim_v,
        attention.kv};
    const size_t k_bytes = static_cast<size_t>(k_elements(cache)) * static_cast<size_t>(size_of(attention.kv));
    const size_t v_bytes = static_cast<size_t>(v_elements(cache)) * static_cast<size_t>(size_of(attention.kv));
    pool_ = MappedMemory::of_cache_on(context, k_bytes + v_bytes);
    // Pages of a CPU that nobody has written are all one page of zeros. The pattern is a finite value of every dtype.
    constexpr int kPattern = 0x3c;
    if (!replay::gpu::is_gpu(context)) std::memset(pool_.data(), kPattern, pool_.bytes());
    std::byte* const k = pool_.data();
    const bool packed = attention.kv_format == KvFormat::kCpuPacked;
    const bool hnd = stack_.layout == replay::KvLayout::kStridedHnd;
    args_.cache = packed ? make_cpu_packed_view(cache, k, k + k_bytes)
                  : hnd  ? make_hnd_view(cache, k, k + k_bytes)
                         : make_nhd_view(cache, k, k + k_bytes);
    pages_.resize(static_cast<size_t>(num_pages));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937_64(1));
    for (int32_t r = 0; r <= shape_.batch; ++r) indptr_.push_back(r * pages_each);
    const auto indices = arrays_[0].place(std::span<const int32_t>(pages_));
    PageTableView& table = args_.table;
    table.kind = PageTableKind::kCsr;
    table.indices = indices.data();
    table.num_indices = static_cast<int64_t>(indices.size());
    table.indptr = arrays_[1].place(std::span<const int32_t>(indptr_)).data();
    table.num_rows = shape_.batch;
  }

  BenchShape shape_;
  StackConfig stack_;
  DcpAttention layer_;
  std::array<replay::StepArray, 2> arrays_;
  std::vector<int32_t> pages_, indptr_, cu_q_, seq_lens_;
  MappedMemory pool_, q_, out_, workspace_;
  DcpArgs args_;
  DcpPlan plan_;
};

}  // namespace

RanksResult run_ranks_case(const Context& context, const StackConfig& stack, const BenchShape& shape,
                           const RanksOptions& options, const BenchEffort& effort) {
  if (stack.num_q_heads % (int64_t{options.ranks} * stack.num_kv_heads) != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} query heads over {} ranks and {} KV heads, which all ranks share: the first must be a "
                            "multiple of the others' product",
                            stack.num_q_heads, options.ranks, stack.num_kv_heads));
  }
  if (stack.kv == DType::kInt8) {
    throw Error(ErrorCode::kUnsupported, "int8 caches over ranks; bench --ranks takes the other dtypes");
  }
  distributed::SimulatedGroupOptions simulated;
  simulated.topology = options.topology;
  simulated.context = context;
  const auto group = distributed::make_simulated_group(options.ranks, simulated);
  const auto alone = distributed::make_simulated_group(1, simulated);
  RankLayer divided(context, *group, stack, config_of(context, stack, options, options.ranks), shape);
  RankLayer whole(context, *alone, stack, config_of(context, stack, options, 1), shape);
  divided.run();  // warm
  whole.run();

  RanksResult result;
  result.shape = shape;
  result.ranks = options.ranks;
  result.kernel = divided.kernel_name();
  group->reset_traffic();
  divided.run();
  const distributed::Traffic traffic = group->traffic();
  result.link_seconds = traffic.seconds;
  result.bytes_sent = traffic.bytes_sent;
  result.operations = traffic.operations;
  std::vector<double> one, rank, layer, efficiency;
  for (int32_t round = 0; round < effort.rounds; ++round) {
    one.push_back(seconds_of(context, effort.min_seconds, [&] { whole.run(); }));
    rank.push_back(seconds_of(context, effort.min_seconds, [&] { divided.run(); }));
    layer.push_back(rank.back() + traffic.seconds);
    efficiency.push_back(one.back() / (options.ranks * layer.back()));
  }
  result.one_seconds = spread_of(one);
  result.rank_seconds = spread_of(rank);
  result.layer_seconds = spread_of(layer);
  result.efficiency = spread_of(efficiency);
  return result;
}

}  // namespace folio::cli
