#include "ranks_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "replay/gpu.hpp"
#include "replay/stopwatch.hpp"
#if defined(FOLIO_CLI_HAS_NCCL)
#include "folio/distributed/nccl_group.hpp"
#endif

namespace folio::cli {
namespace {

using replay::StackConfig;

void check_heads(const StackConfig& stack, const RanksOptions& options) {
  if (!options.divide_queries && stack.num_q_heads % (int64_t{options.ranks} * stack.num_kv_heads) != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} query heads over {} ranks and {} KV heads, which all ranks share: the first must be a "
                            "multiple of the others' product",
                            stack.num_q_heads, options.ranks, stack.num_kv_heads));
  }
  if (stack.kv == DType::kInt8) {
    throw Error(ErrorCode::kUnsupported, "int8 caches over ranks; bench --ranks takes the other dtypes");
  }
}

/// Runs of a layer, one by one or several in a graph.
class Runs {
 public:
  Runs(const Context& context, RankLayer& layer, bool graph) : context_(context), layer_(layer) {
    layer.run();  // warm
    replay::gpu::wait(context);
    if (!graph) return;
    captured_.emplace(context, [&](Stream stream) {
      for (int32_t i = 0; i < kRunsOfGraph; ++i) layer.run(stream);
    });
    captured_->launch();
    replay::gpu::wait(context);
  }
  void operator()() const { captured_ ? captured_->launch() : layer_.run(); }
  int32_t runs_of_a_call() const { return captured_ ? kRunsOfGraph : 1; }

  /// Of one run.
  double seconds(double min_seconds) const {
    return seconds_of(context_, min_seconds, std::cref(*this)) / runs_of_a_call();
  }
  /// Of one run, over so many calls, which all ranks begin together.
  double seconds_of_calls(int64_t calls, distributed::ProcessGroup& control) const {
    (*this)();
    replay::gpu::wait(context_);
    control.barrier();
    replay::Stopwatch watch;
    for (int64_t i = 0; i < calls; ++i) (*this)();
    replay::gpu::wait(context_);
    return watch.elapsed() / static_cast<double>(calls * runs_of_a_call());
  }

 private:
  static constexpr int32_t kRunsOfGraph = 16;
  Context context_;
  RankLayer& layer_;
  std::optional<replay::gpu::CapturedWork> captured_;
};

/// What the rounds found.
struct Rounds {
  std::vector<double> one, layer, efficiency;
  void add(int32_t ranks, double undivided, double divided) {
    one.push_back(undivided);
    layer.push_back(divided);
    efficiency.push_back(undivided / (ranks * divided));
  }
  void give(RanksResult& result) const {
    result.one_seconds = spread_of(one);
    result.layer_seconds = spread_of(layer);
    result.efficiency = spread_of(efficiency);
  }
};

}  // namespace

RanksResult simulate_ranks(const Context& context, const StackConfig& stack, const BenchShape& shape,
                           const RanksOptions& options, const distributed::Topology& topology,
                           const BenchEffort& effort) {
  check_heads(stack, options);
  distributed::SimulatedGroupOptions simulated;
  simulated.topology = topology;
  simulated.context = context;
  const auto group = distributed::make_simulated_group(options.ranks, simulated);
  const auto alone = distributed::make_simulated_group(1, simulated);
  const auto divided = make_rank_layer(context, *group, stack, options, shape);
  const auto whole = make_rank_layer(context, *alone, stack, options, shape);
  const Runs divided_runs(context, *divided, options.graph), whole_runs(context, *whole, options.graph);

  RanksResult result;
  result.shape = shape;
  result.ranks = options.ranks;
  result.kernel = divided->kernel_name();
  group->reset_traffic();
  divided->run();
  const distributed::Traffic traffic = group->traffic();
  result.link_seconds = traffic.seconds;
  result.bytes_sent = traffic.bytes_sent;
  result.operations = traffic.operations;
  std::vector<double> rank;
  Rounds rounds;
  for (int32_t round = 0; round < effort.rounds; ++round) {
    const double one = whole_runs.seconds(effort.min_seconds);
    rank.push_back(divided_runs.seconds(effort.min_seconds));
    rounds.add(options.ranks, one, rank.back() + traffic.seconds);
  }
  result.rank_seconds = spread_of(rank);
  rounds.give(result);
  return result;
}

#if defined(FOLIO_CLI_HAS_NCCL)

RanksResult measure_ranks(const StackConfig& stack, const BenchShape& shape, const RanksOptions& options,
                          const BenchEffort& effort) {
  check_heads(stack, options);
  if (replay::gpu::count() < options.ranks) {
    throw Error(ErrorCode::kUnavailable, fmt::format("{} ranks on {} GPUs; each has one of its own, or give --simulate",
                                                     options.ranks, replay::gpu::count()));
  }
  RanksResult result;
  result.shape = shape;
  result.ranks = options.ranks;
  const distributed::NcclUniqueId id = distributed::nccl_unique_id();
  std::vector<double> seconds(static_cast<size_t>(options.ranks));
  int64_t calls = 1;
  Rounds rounds;
  distributed::run_ranks(options.ranks, [&](distributed::ProcessGroup& control) {
    const int32_t rank = control.rank();
    const Context context = Context::cuda(rank);
    distributed::NcclGroupOptions nccl;
    nccl.id = id;
    nccl.rank = rank;
    nccl.size = options.ranks;
    nccl.control = &control;
    const auto group = distributed::make_nccl_group(context, nccl);
    const auto divided = make_rank_layer(context, *group, stack, options, shape);
    control.barrier();  // no rank allocates while another one's kernel waits for it
    const Runs divided_runs(context, *divided, options.graph);
    std::unique_ptr<distributed::SimulatedGroup> alone;
    std::unique_ptr<RankLayer> whole;
    std::optional<Runs> whole_runs;
    if (rank == 0) {
      result.kernel = divided->kernel_name();
      result.over_peer_memory = divided->over_peer_memory();
      distributed::SimulatedGroupOptions one;
      one.context = context;
      alone = distributed::make_simulated_group(1, one);
      whole = make_rank_layer(context, *alone, stack, options, shape);
      whole_runs.emplace(context, *whole, options.graph);
      const double undivided = whole_runs->seconds(effort.min_seconds);
      calls = std::max<int64_t>(
          1, static_cast<int64_t>(effort.min_seconds * options.ranks / undivided / whole_runs->runs_of_a_call()));
    }
    control.barrier();
    for (int32_t round = 0; round < effort.rounds; ++round) {
      const double undivided = rank == 0 ? whole_runs->seconds(effort.min_seconds) : 0.0;
      control.barrier();
      seconds[static_cast<size_t>(rank)] = divided_runs.seconds_of_calls(calls, control);
      control.barrier();
      if (rank == 0) rounds.add(options.ranks, undivided, *std::max_element(seconds.begin(), seconds.end()));
    }
  });
  rounds.give(result);
  return result;
}

#else

RanksResult measure_ranks(const StackConfig&, const BenchShape&, const RanksOptions&, const BenchEffort&) {
  throw Error(ErrorCode::kUnavailable,
              "this build has no NCCL, which ranks on several GPUs need; --simulate is offered");
}

#endif

}  // namespace folio::cli
