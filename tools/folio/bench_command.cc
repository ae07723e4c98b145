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
#include "replay/report.hpp"
#include "replay/yardstick.hpp"

namespace folio::cli {
namespace {

struct BenchFlags {
  AttentionFlags attention;
  std::string sweep = "all";
  std::vector<int32_t> batch = {1, 16};
  std::vector<int32_t> kv_len = {1024, 8192};
  std::vector<int32_t> q_len = {128, 512};
  int32_t rounds = 7;
  double min_ms = 20.0;
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

int bench(const BenchFlags& flags) {
  if (std::isnan(flags.min_ms)) throw Error(ErrorCode::kInvalidArgument, "--min-ms is nan; expected milliseconds");
  const std::vector<BenchShape> shapes = shapes_of(flags);
  const Context context = flags.attention.context();
  const std::atomic<bool>& stop = interrupted_by_user();
  std::optional<replay::OutputFile> json_file = replay::output_file(flags.json);
  std::FILE* out = flags.json == "-" ? stderr : stdout;
  if (!flags.quiet) print_header(out, flags, context);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const BenchShape& shape : shapes) {
    if (stop.load()) break;
    const BenchResult result =
        run_bench_case(context, flags.attention.stack(1), shape, {flags.rounds, flags.min_ms / 1e3});
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
  flags->attention.add_to(*command, false);
  command->add_option("--json", flags->json, "write the figures as JSON; '-' = standard output");
  command->add_flag("-q,--quiet", flags->quiet, "print no table");
  command->footer(
      "Machines are shared and clocks move: only the shares, taken round by round in one process, can be compared.\n"
      "A share of the plain read above 100% means that the pages fit a cache, or that keys are shared by rows.");
  return {command, [flags] { return bench(*flags); }};
}

}  // namespace folio::cli
