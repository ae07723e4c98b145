#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>

#include "attention_flags.hpp"
#include "bench_case.hpp"
#include "commands.hpp"
#include "folio/types/error.hpp"
#include "json_output.hpp"
#include "progress.hpp"
#include "ranks_case.hpp"
#include "replay/eta.hpp"
#include "replay/report.hpp"
#include "replay/yardstick.hpp"

namespace folio::cli {
namespace {

/// "450:6:90": gigabytes a second out of a rank, microseconds of an operation, and gigabytes a second to one other
/// rank, which may be left out.
distributed::Link link_of(const char* flag, const std::string& text) {
  double gigabytes = 0.0, microseconds = 0.0, to_one = 0.0;
  char rest = 0;
  int end = 0;
  bool read = std::sscanf(text.c_str(), "%lf:%lf%n", &gigabytes, &microseconds, &end) == 2;
  if (read && text.c_str()[end] != '\0') {
    read = std::sscanf(text.c_str() + end, ":%lf%c", &to_one, &rest) == 1 && std::isfinite(to_one) && to_one > 0.0;
  }
  if (!read || !std::isfinite(gigabytes) || !std::isfinite(microseconds) || gigabytes <= 0.0 || microseconds < 0.0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} is '{}'; expected gigabytes a second, microseconds an operation, and gigabytes a second "
                    "to one rank, as in 450:6 or 450:6:90",
                    flag, text));
  }
  return {gigabytes * 1e9, microseconds * 1e-6, to_one * 1e9};
}

/// What link_of reads.
std::string text_of(const distributed::Link& link) {
  const std::string text = fmt::format("{:g}:{:g}", link.bytes_per_second / 1e9, link.seconds_per_operation * 1e6);
  return link.bytes_per_second_to_one > 0.0 ? fmt::format("{}:{:g}", text, link.bytes_per_second_to_one / 1e9) : text;
}

struct BenchFlags {
  AttentionFlags attention;
  std::string sweep = "all";
  std::vector<int32_t> batch = {1, 16};
  std::vector<int32_t> kv_len = {1024, 8192};
  std::vector<int32_t> q_len = {128, 512};
  int32_t rounds = 7;
  double min_ms = 20.0;
  std::vector<int32_t> ranks;  ///< empty: no ranks
  bool simulate = false;
  bool graph = false;
  bool pcp = false;
  std::string pcp_exchange = "automatic";
  std::string dcp_comm = "ag_rs";
  std::string transport = "auto";
  DType partial_dtype = DType::kFloat32;
  int32_t dcp_interleave = 1;
  int32_t ranks_per_node = distributed::Topology{}.ranks_per_node;
  std::string node_link = text_of(distributed::Topology{}.within_node);
  std::string network_link = text_of(distributed::Topology{}.between_nodes);
  bool quiet = false;
  std::string json;
};

std::vector<BenchShape> shapes_of(const BenchFlags& flags) {
  std::vector<BenchShape> shapes;
  for (const int32_t kv_len : flags.kv_len) {
    if (flags.sweep != "prefill") {
      for (const int32_t batch : flags.batch) shapes.push_back({batch, 1, kv_len});
    }
    if (flags.sweep == "decode") continue;
    for (const int32_t q_len : flags.q_len) {
      if (q_len <= kv_len) shapes.push_back({1, q_len, kv_len});
    }
  }
  if (shapes.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "nothing to measure: every --q-len is larger than every --kv-len");
  }
  return shapes;
}

nlohmann::ordered_json json_of(const Spread& spread) {
  return {{"median", spread.median}, {"min", spread.min}, {"max", spread.max}};
}

nlohmann::ordered_json json_of(const BenchResult& r) {
  return {{"kind", r.shape.q_len == 1 ? "decode" : "prefill"},
          {"batch", r.shape.batch},
          {"q_len", r.shape.q_len},
          {"kv_len", r.shape.kv_len},
          {"kernel", r.kernel},
          {"kv_bytes", r.kv_bytes},
          {"flop", r.flops},
          {"run_s", json_of(r.run_seconds)},
          {"plan_s", json_of(r.plan_seconds)},
          {"kv_bytes_per_s", json_of(r.read_rate)},
          {"flop_per_s", json_of(r.multiply_rate)},
          {"yardstick_read_bytes_per_s", json_of(r.read_limit)},
          {"yardstick_multiply_flop_per_s", json_of(r.multiply_limit)},
          {"share_of_read", json_of(r.share_of_read)},
          {"share_of_multiply", json_of(r.share_of_multiply)},
          {"yardstick_matrix_flop_per_s", json_of(r.matrix_limit)},
          {"share_of_matrix", json_of(r.share_of_matrix)}};
}

std::string giga(const Spread& s) {
  return fmt::format("{:.1f} [{:.1f}-{:.1f}]", s.median / 1e9, s.min / 1e9, s.max / 1e9);
}
std::string percent(const Spread& s) {
  return fmt::format("{:.0f}% [{:.0f}-{:.0f}]", 100 * s.median, 100 * s.min, 100 * s.max);
}

void print_header(std::FILE* out, const BenchFlags& flags, const Context& context) {
  if (context.device().type == DeviceType::kCuda) {
    fmt::print(out,
               "CUDA device {}, {} SMs; yardstick: copies within device memory, bytes read and written; "
               "medians of {} alternating rounds [min-max]\n",
               context.device().index, context.concurrency(), flags.rounds);
  } else {
    fmt::print(
        out,
        "{} threads; yardsticks: plain reads of the same pages (best of 1, 4 and 8 streams); float32 multiply-adds in\n"
        "registers ({}), or for AMX bfloat16 products in tile registers; medians of {} alternating rounds [min-max]\n",
        context.concurrency(), replay::yardstick_isa(), flags.rounds);
  }
  fmt::print(out, "{:<8}{:>6}{:>6}{:>8}  {:<22}{:<22}{:<22}{:<22}{:<22}{}\n", "", "batch", "q", "kv", "run ms",
             "KV GB/s", context.device().type == DeviceType::kCuda ? "of copies" : "of plain read", "GFLOP/s",
             "of multiply rate", "of AMX rate");
}

void print_row(std::FILE* out, const BenchResult& r) {
  const Spread& s = r.run_seconds;
  fmt::print(out, "{:<8}{:>6}{:>6}{:>8}  {:<22}{:<22}{:<22}{:<22}{:<22}{}\n", r.shape.q_len == 1 ? "decode" : "prefill",
             r.shape.batch, r.shape.q_len, r.shape.kv_len,
             fmt::format("{:.3f} [{:.3f}-{:.3f}]", s.median * 1e3, s.min * 1e3, s.max * 1e3), giga(r.read_rate),
             percent(r.share_of_read), giga(r.multiply_rate),
             r.multiply_limit.median > 0.0 ? percent(r.share_of_multiply) : "-",
             r.matrix_limit.median > 0.0 ? percent(r.share_of_matrix) : "-");
  std::fflush(out);
}

nlohmann::ordered_json json_of(const RanksResult& r, bool simulated) {
  nlohmann::ordered_json row = {{"ranks", r.ranks},
                                {"batch", r.shape.batch},
                                {"q_len", r.shape.q_len},
                                {"kv_len", r.shape.kv_len},
                                {"kernel", r.kernel},
                                {"one_rank_s", json_of(r.one_seconds)},
                                {"layer_s", json_of(r.layer_seconds)},
                                {"efficiency", json_of(r.efficiency)}};
  if (!simulated) {
    row["over_peer_memory"] = r.over_peer_memory;
    return row;
  }
  row["rank_s"] = json_of(r.rank_seconds);
  row["operations"] = r.operations;
  row["bytes_sent"] = r.bytes_sent;
  row["link_s"] = r.link_seconds;
  return row;
}

void print_ranks_header(std::FILE* out, const BenchFlags& flags) {
  const std::string division = flags.pcp ? "queries divided, exchange " + flags.pcp_exchange
                                         : fmt::format("combine {}, partial results in {}, transport {}",
                                                       flags.dcp_comm, to_string(flags.partial_dtype), flags.transport);
  if (flags.simulate) {
    fmt::print(out,
               "rank 0 of a simulated group, {}; {} ranks a node; links (GB/s:us) {} in a node, {} between nodes;\n"
               "rank: its kernels and copies, measured; links: by their model; ",
               division, flags.ranks_per_node, flags.node_link, flags.network_link);
  } else {
    fmt::print(out, "one GPU a rank, {}{};\n", division, flags.graph ? ", in graphs" : "");
  }
  fmt::print(out, "medians of {} alternating rounds [min-max]\n", flags.rounds);
  fmt::print(out, "{:>5}{:>6}{:>6}{:>9}  {:<26}{:<26}{:<11}", "ranks", "batch", "q", "kv", "one rank ms", "layer ms",
             "efficiency");
  if (flags.simulate) fmt::print(out, "  {:<26}{:>10}{:>11}", "rank ms", "links ms", "sent MB");
  fmt::print(out, "\n");
}

void print_ranks_row(std::FILE* out, const RanksResult& r, bool simulated) {
  const auto ms = [](const Spread& s) {
    return fmt::format("{:.3f} [{:.3f}-{:.3f}]", s.median * 1e3, s.min * 1e3, s.max * 1e3);
  };
  fmt::print(out, "{:>5}{:>6}{:>6}{:>9}  {:<26}{:<26}{:<11}", r.ranks, r.shape.batch, r.shape.q_len, r.shape.kv_len,
             ms(r.one_seconds), ms(r.layer_seconds), percent(r.efficiency));
  if (simulated) {
    fmt::print(out, "  {:<26}{:>10.3f}{:>11.3f}", ms(r.rank_seconds), r.link_seconds * 1e3, r.bytes_sent / 1e6);
  }
  fmt::print(out, "\n");
  std::fflush(out);
}

/// Which case of the sweep is measured, and how long the others may take.
class SweepProgress {
 public:
  SweepProgress(bool quiet, size_t cases) : progress_(quiet), cases_(cases) {}

  void show(size_t done) {
    if (!progress_.due_or_watched()) return;
    progress_.show(fmt::format("measuring case {} of {}{}", done + 1, cases_,
                               replay::eta(static_cast<double>(done) / static_cast<double>(cases_), watch_.elapsed())));
  }
  void finish() { progress_.clear(); }

 private:
  Progress progress_;
  size_t cases_;
  replay::Stopwatch watch_;
};

/// The sweep's shapes for each count of ranks.
int bench_ranks(const BenchFlags& flags) {
  const bool on_gpus = flags.attention.device == "cuda";
  if (!flags.simulate && !on_gpus) {
    throw Error(ErrorCode::kInvalidArgument,
                "--ranks without --simulate takes GPUs: give --device cuda, or simulate them");
  }
  if (flags.graph && (!on_gpus || flags.pcp)) {
    throw Error(ErrorCode::kInvalidArgument, "--graph is for --device cuda, without --pcp");
  }
  if (flags.transport != "auto" && (flags.simulate || flags.pcp)) {
    throw Error(ErrorCode::kInvalidArgument, "--transport is for --device cuda, without --simulate and --pcp");
  }
  if (flags.partial_dtype != DType::kFloat32 && flags.pcp) {
    throw Error(ErrorCode::kInvalidArgument,
                "--partial-dtype is for ranks that have heads of their own, without --pcp");
  }
  const std::vector<BenchShape> shapes = shapes_of(flags);
  const Context context = flags.attention.context();
  const replay::StackConfig stack = flags.attention.stack(1);
  RanksOptions options;
  options.interleave = flags.dcp_interleave;
  options.graph = flags.graph;
  options.transport = distributed::dcp_transport_from_name(flags.transport);
  options.partial_dtype = flags.partial_dtype;
  options.divide_queries = flags.pcp;
  options.exchange = flags.pcp_exchange == "pass_q"    ? distributed::PcpExchange::kPassQ
                     : flags.pcp_exchange == "pass_kv" ? distributed::PcpExchange::kPassKv
                                                       : distributed::PcpExchange::kAutomatic;
  const distributed::Topology topology{flags.ranks_per_node, link_of("--node-link", flags.node_link),
                                       link_of("--network-link", flags.network_link)};
  const BenchEffort effort{flags.rounds, flags.min_ms / 1e3};
  std::optional<replay::OutputFile> json_file = replay::output_file(flags.json);
  std::FILE* out = flags.json == "-" ? stderr : stdout;
  if (!flags.quiet) print_ranks_header(out, flags);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  SweepProgress progress(flags.quiet, shapes.size() * flags.ranks.size());
  for (const BenchShape& shape : shapes) {
    for (const int32_t ranks : flags.ranks) {
      if (interrupted_by_user().load()) return kInterrupted;
      progress.show(rows.size());
      options.ranks = ranks;
      options.combine = distributed::dcp_combine_from_name(flags.dcp_comm, ranks);
      const RanksResult result = flags.simulate ? simulate_ranks(context, stack, shape, options, topology, effort)
                                                : measure_ranks(stack, shape, options, effort);
      progress.finish();
      if (!flags.quiet) print_ranks_row(out, result, flags.simulate);
      rows.push_back(json_of(result, flags.simulate));
    }
  }
  if (json_file) {
    nlohmann::ordered_json document = {
        {"device", flags.attention.device},
        {"threads", context.concurrency()},
        {"simulated", flags.simulate},
        {"graph", flags.graph},
        {"pcp", flags.pcp},
        {"transport", flags.transport},
        {flags.pcp ? "pcp_exchange" : "dcp_comm", flags.pcp ? flags.pcp_exchange : flags.dcp_comm},
        {"partial_dtype", to_string(flags.partial_dtype)},
        {"rounds", flags.rounds}};
    if (flags.simulate) {
      document["ranks_per_node"] = flags.ranks_per_node;
      document["node_link"] = flags.node_link;
      document["network_link"] = flags.network_link;
    }
    document["cases"] = rows;
    write_json(document, *json_file);
  }
  return kSuccess;
}

int bench(const BenchFlags& flags) {
  if (std::isnan(flags.min_ms)) throw Error(ErrorCode::kInvalidArgument, "--min-ms is nan; expected milliseconds");
  if (!flags.ranks.empty()) return bench_ranks(flags);
  if (flags.simulate || flags.pcp)
    throw Error(ErrorCode::kInvalidArgument, "--simulate and --pcp without --ranks: give how many");
  const std::vector<BenchShape> shapes = shapes_of(flags);
  const Context context = flags.attention.context();
  const std::atomic<bool>& stop = interrupted_by_user();
  std::optional<replay::OutputFile> json_file = replay::output_file(flags.json);
  std::FILE* out = flags.json == "-" ? stderr : stdout;
  if (!flags.quiet) print_header(out, flags, context);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  SweepProgress progress(flags.quiet, shapes.size());
  for (const BenchShape& shape : shapes) {
    if (stop.load()) break;
    progress.show(rows.size());
    const BenchResult result =
        run_bench_case(context, flags.attention.stack(1), shape, {flags.rounds, flags.min_ms / 1e3});
    progress.finish();
    if (!flags.quiet) print_row(out, result);
    rows.push_back(json_of(result));
  }
  if (json_file) {
    write_json({{"device", flags.attention.device},
                {"threads", context.concurrency()},
                {"yardstick_isa", replay::yardstick_isa()},
                {"rounds", flags.rounds},
                {"cases", rows}},
               *json_file);
  }
  return stop.load() ? kInterrupted : kSuccess;
}

}  // namespace

Command add_bench_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Measure decode and prefill beside this machine's own limits");
  auto flags = std::make_shared<BenchFlags>();
  command->add_option("--sweep", flags->sweep, "decode, prefill or all")
      ->check(CLI::IsMember({"decode", "prefill", "all"}))
      ->capture_default_str();
  command->add_option("--batch", flags->batch, "decode: requests in a step")
      ->delimiter(',')
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  command->add_option("--kv-len", flags->kv_len, "keys of each request")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--q-len", flags->q_len, "prefill: new tokens of the one request")
      ->delimiter(',')
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command->add_option("--rounds", flags->rounds, "rounds, each of attention and the yardsticks")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--min-ms", flags->min_ms, "repeat a measurement within a round until it took so long")
      ->check(CLI::Range(0.001, 60000.0))
      ->capture_default_str();
  auto* const ranks = command->add_option("--ranks", flags->ranks,
                                          "decode context parallelism: so many ranks divide every request's KV");
  ranks->delimiter(',')->check(CLI::Range(1, 1024));
  command->add_flag("--simulate", flags->simulate,
                    "with --ranks: this machine runs rank 0, whose links take what their rates say; else each rank "
                    "has a GPU");
  command->add_flag("--graph", flags->graph, "with --ranks on GPUs: 16 runs in a CUDA graph");
  command->add_flag("--pcp", flags->pcp, "with --ranks: they divide the queries too (prefill context parallelism)");
  command->add_option("--pcp-exchange", flags->pcp_exchange, "with --pcp: what travels for older tokens")
      ->check(CLI::IsMember({"automatic", "pass_q", "pass_kv"}))
      ->capture_default_str();
  command->add_option("--dcp-comm", flags->dcp_comm, "with --ranks: how they combine their results")
      ->check(CLI::IsMember({"ag_rs", "a2a"}))
      ->needs(ranks)
      ->capture_default_str();
  command->add_option("--transport", flags->transport, "with --ranks on GPUs: by what they exchange")
      ->check(CLI::IsMember({"auto", "group", "peer"}))
      ->capture_default_str();
  add_dtype_option(*command, "--partial-dtype", flags->partial_dtype,
                   "with --ranks: what partial results travel in: float32 (default), or the queries' 16-bit type");
  command->get_option("--partial-dtype")->needs(ranks);
  command->add_option("--dcp-interleave", flags->dcp_interleave, "with --ranks: neighbouring tokens on one rank")
      ->check(CLI::Range(1, 1 << 20))
      ->needs(ranks)
      ->capture_default_str();
  command
      ->add_option("--ranks-per-node", flags->ranks_per_node,
                   "with --ranks: ranks that reach each other by the node's link")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command
      ->add_option("--node-link", flags->node_link,
                   "with --ranks: GB/s out of a rank within its node, us an operation, GB/s to one other rank")
      ->capture_default_str();
  command->add_option("--network-link", flags->network_link, "with --ranks: the same to other nodes")
      ->capture_default_str();
  flags->attention.add_to(*command, false);
  command->add_option("--json", flags->json, "write the figures as JSON; '-' = standard output")->type_name("FILE");
  command->add_flag("-q,--quiet", flags->quiet, "print no table");
  command->footer(
      "Machines are shared and clocks move: only the shares, taken round by round in one process, can be compared.\n"
      "A share of the plain read above 100% means that the pages fit a cache, or that keys are shared by rows.");
  return {command, [flags] { return bench(*flags); }};
}

}  // namespace folio::cli
