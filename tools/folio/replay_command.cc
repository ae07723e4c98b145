#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include "attention_flags.hpp"
#include "commands.hpp"
#include "folio/backends/common.hpp"
#include "json_output.hpp"
#include "mpi_session.hpp"
#include "progress.hpp"
#include "replay/prefix_count.hpp"
#include "replay/report.hpp"

namespace folio::cli {
namespace {

using replay::TraceFormat;

constexpr int64_t kMostIds = std::numeric_limits<int32_t>::max();  // requests and pages are numbered by int32
constexpr int64_t kMostPoolMb = int64_t{1} << 30;

struct ReplayFlags {
  std::string trace;
  TraceFormat format = TraceFormat::kDetect;
  int32_t scale = 32;
  int64_t requests = 0;
  AttentionFlags attention;
  replay::ServingBackend backend = replay::ServingBackend::kNone;
  std::string kv_cache_dtype;
  int32_t ranks = 1;
  int32_t dcp_interleave = 1;
  std::string dcp_comm = "ag_rs";
  backends::CascadeMode cascade = backends::CascadeMode::kOff;
  bool plan_only = false;
  replay::SchedulerOptions scheduler;
  replay::ClockOptions clock;
  replay::CheckOptions checks;
  bool serial = false;
  bool no_prefix_reuse = false;
  int64_t pool_pages = 0;
  int64_t pool_mb = 512;
  int64_t window_pages = 0;
  bool unlimited_pool = false;
  uint64_t seed = 1;
  bool count_prefix_hits = false;
  bool quiet = false;
  std::string json;
  std::string timeline;
  std::string samples;
  CLI::Option* page_size = nullptr;
  bool batch_invariant = false;
};

void add_workload_options(CLI::App& app, ReplayFlags& flags) {
  app.add_option("trace", flags.trace, "trace file; '-' = standard input")->required();
  app.add_option_function<std::string>(
         "--format",
         [&flags](const std::string& name) {
           if (name == "mooncake") flags.format = TraceFormat::kMooncake;
           if (name == "azure") flags.format = TraceFormat::kAzure;
         },
         "the trace's format: mooncake (JSON lines), azure (CSV); found out by itself if not given")
      ->check(CLI::IsMember({"mooncake", "azure", "detect"}));
  app.add_option("--scale", flags.scale, "divide all lengths by this; with prefix hashes it must divide 512")
      ->check(CLI::Range(1, replay::kMaxTraceTokens))
      ->capture_default_str();
  app.add_option("--requests", flags.requests, "only the first so many requests; 0 = all")
      ->check(CLI::Range(int64_t{0}, kMostIds));
  app.add_option("--seed", flags.seed, "seed of keys, values, queries and of the choice of checked rows")
      ->capture_default_str();
}

void add_cascade_option(CLI::App& app, ReplayFlags& flags) {
  app.add_option_function<std::string>(
         "--cascade", [&flags](const std::string& name) { flags.cascade = backends::cascade_mode_from_name(name); },
         "read the pages that requests of a step share once: auto (found in the page tables, where it saves bytes; "
         "requests are ordered for it), heuristic (vLLM's rule, about what all requests share), off (the default). "
         "Outputs are the same within rounding; nothing is shared with --determinism batch-invariant or above. "
         "With every --backend but token_pool, and not over the ranks of --ranks")
      ->check(CLI::IsMember({"auto", "off", "heuristic"}));
  app.add_flag("--plan-only", flags.plan_only,
               "no KV pool and no attention: schedule and plan every step and count what the plans would read")
      ->excludes(app.get_option("--dump-samples"))
      ->excludes(app.get_option("--check-rate"));
}

void add_backend_options(CLI::App& app, ReplayFlags& flags) {
  app.add_option_function<std::string>(
         "--backend",
         [&flags](const std::string& name) {
           if (name == "flashinfer") flags.backend = replay::ServingBackend::kFlashInfer;
           if (name == "flash_attn") flags.backend = replay::ServingBackend::kFlashAttention;
           if (name == "token_pool") flags.backend = replay::ServingBackend::kTokenPool;
         },
         "who serves the layers: none (Folio's own calls, the default) or an engine backend: flashinfer, flash_attn, "
         "token_pool (with slots, a request table and a radix tree in place of the page manager; any --page-size from "
         "1 on)")
      ->check(CLI::IsMember({"none", "flashinfer", "flash_attn", "token_pool"}));
  app.add_option(
         "--draft-tokens", flags.scheduler.drafts.tokens,
         "token_pool: speculative decoding with so many tokens to verify a step and request, the last generated "
         "one included; the drafts are made up, seven in ten of them right")
      ->check(CLI::Range(2, 64));
  app.add_option("--draft-topk", flags.scheduler.drafts.topk,
                 "with --draft-tokens: drafts behind each token, 1 = a chain; above 1 with --page-size 1")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  auto* const ranks = app.add_option(
      "--ranks", flags.ranks,
      "decode context parallelism, with --backend flashinfer and flash_attn: so many ranks divide every request's KV "
      "and the query heads of each group; threads of this process (with --device cuda on GPUs of their own where there "
      "are as many), or on a CPU the processes of mpirun -n N folio replay ...");
  ranks->check(CLI::Range(1, 1024))->capture_default_str();
  app.add_option("--dcp-interleave", flags.dcp_interleave, "with --ranks: neighbouring tokens on one rank")
      ->check(CLI::Range(1, replay::kMaxTraceTokens))
      ->needs(ranks)
      ->capture_default_str();
  app.add_option("--dcp-comm", flags.dcp_comm, "with --ranks: how they combine their results")
      ->check(CLI::IsMember({"ag_rs", "a2a"}))
      ->needs(ranks)
      ->capture_default_str();
  app.add_option("--kv-cache-dtype", flags.kv_cache_dtype,
                 "--kv-dtype by the names that engines use: auto (the outputs' type), float16, bfloat16, float32, fp8 "
                 "(= fp8_e4m3), fp8_e5m2")
      ->excludes(app.get_option("--kv-dtype"));
  app.add_flag("--batch-invariant", flags.batch_invariant, "the same as --determinism batch-invariant")
      ->excludes(app.get_option("--determinism"));
}

void add_serving_options(CLI::App& app, ReplayFlags& flags) {
  app.add_option("--token-budget", flags.scheduler.token_budget, "most tokens that a step computes")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--max-running", flags.scheduler.max_running, "most requests that a step serves")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_flag("--serial", flags.serial, "one request after the other");
  app.add_flag("--no-prefix-reuse", flags.no_prefix_reuse, "compute every prefix anew");
  auto* pages =
      app.add_option("--pool-pages", flags.pool_pages, "pages in the KV pool")->check(CLI::Range(int64_t{1}, kMostIds));
  auto* mb = app.add_option("--pool-mb", flags.pool_mb, "size of the KV pool over all layers, MiB")
                 ->check(CLI::Range(int64_t{1}, kMostPoolMb))
                 ->capture_default_str();
  auto* unlimited = app.add_flag("--unlimited-pool", flags.unlimited_pool, "a pool in which nothing is ever evicted");
  app.add_option("--window-pages", flags.window_pages,
                 "token_pool, models with a sliding window: pages in the pool of the layers that have it; as many as "
                 "the others' if not given")
      ->check(CLI::Range(int64_t{1}, kMostIds));
  pages->excludes(mb)->excludes(unlimited);
  mb->excludes(unlimited);
  app.add_option("--step-ms", flags.clock.step_ms,
                 "simulated length of a step, ms: decides how many requests arrive meanwhile")
      ->capture_default_str();
  app.add_option("--time-scale", flags.clock.time_scale,
                 "run the simulated clock at so many times the wall clock instead, waiting for arrivals; results then "
                 "depend on the "
                 "machine's speed");
}

void add_output_options(CLI::App& app, ReplayFlags& flags) {
  app.add_option("--check-rate", flags.checks.rate, "share of computed rows to compare with the float64 oracle")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--dump-samples", flags.samples,
                 "write the sampled rows' bits to a file, to compare runs; '-' = standard output");
  app.add_option("--json", flags.json,
                 "write the summary as JSON; '-' = standard output (the text then goes to standard error)");
  app.add_option("--timeline", flags.timeline, "write a timeline in Chrome trace format; '-' = standard output");
  app.add_flag("-q,--quiet", flags.quiet, "no progress and no summary; --json still writes");
  app.add_flag("--count-prefix-hits", flags.count_prefix_hits,
               "no attention: only count the prefix hits of the trace served one request after the other with an "
               "unlimited pool");
}

int count_hits(const ReplayFlags& flags, const replay::Trace& trace, const replay::Workload& workload) {
  std::optional<replay::OutputFile> json_file = replay::output_file(flags.json);
  // A hash's worth of tokens is the natural page, unless another is asked for.
  const bool by_hash = flags.page_size->count() == 0 && workload.tokens_per_hash > 0;
  const int32_t page_size = by_hash ? workload.tokens_per_hash : flags.attention.page_size;
  const replay::PrefixCount count = replay::count_prefix_hits(workload, page_size);
  const replay::BlockHits blocks = replay::count_block_hits(trace, flags.requests);
  const auto percent = [](int64_t part, int64_t whole) {
    return 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  };
  if (!flags.quiet) {
    fmt::print(flags.json == "-" ? stderr : stdout,
               "{} requests, lengths divided by {}, pages of {} tokens, {} pages\n"
               "  prefix hits   {} of {} prompt tokens ({:.1f}%) in full pages, at least one token a request computed; "
               "{} pages leaked\n"
               "  by hash id    {} of {} unscaled prompt tokens ({:.1f}%) in full hash blocks, {} ({:.1f}%) with "
               "partly filled last ones\n",
               workload.requests.size(), flags.scale, page_size, count.pages, count.hit_tokens, count.input_tokens,
               percent(count.hit_tokens, count.input_tokens), count.leaked_pages, blocks.full_blocks,
               blocks.input_tokens, percent(blocks.full_blocks, blocks.input_tokens), blocks.with_partial,
               percent(blocks.with_partial, blocks.input_tokens));
  }
  if (json_file) {
    write_json({{"requests", workload.requests.size()},
                {"scale", flags.scale},
                {"page_size", page_size},
                {"input_tokens", count.input_tokens},
                {"hit_tokens", count.hit_tokens},
                {"computed_tokens", count.computed_tokens},
                {"leaked_pages", count.leaked_pages},
                {"unscaled",
                 {{"input_tokens", blocks.input_tokens},
                  {"full_blocks", blocks.full_blocks},
                  {"with_partial", blocks.with_partial}}}},
               *json_file);
  }
  return count.leaked_pages == 0 ? kSuccess : kCheckFailed;
}

/// The files that the run's results go to.
struct ReplayOutputs {
  std::optional<replay::OutputFile> json, samples, timeline;
};

ReplayOutputs open_outputs(const ReplayFlags& flags) {
  std::map<std::string, std::string> options;  // by path
  for (const auto& [option, path] : {std::pair{"--json", flags.json}, std::pair{"--dump-samples", flags.samples},
                                     std::pair{"--timeline", flags.timeline}}) {
    if (path.empty()) continue;
    const auto [other, is_new] = options.emplace(path, option);
    if (!is_new) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} and {} both write {}: give each its own file", other->second, option, path));
    }
  }
  return {replay::output_file(flags.json), replay::output_file(flags.samples), replay::output_file(flags.timeline)};
}

/// Pages that the pool options come to.
int64_t pool_pages(const ReplayFlags& flags, const replay::Workload& workload, const replay::StackConfig& stack) {
  const int64_t for_all = std::max<int64_t>(1, workload.pages_for_all(stack.tokens_per_page_id()));
  int64_t pages = flags.pool_pages;
  if (flags.unlimited_pool) pages = for_all;
  if (pages == 0) {
    const double page_bytes = static_cast<double>(stack.num_layers) * stack.tokens_per_page_id() * stack.num_kv_heads *
                              static_cast<double>(stack.token_bytes());
    pages = std::min(for_all, static_cast<int64_t>(static_cast<double>(flags.pool_mb) * (1 << 20) / page_bytes));
    if (pages == 0) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("a page of {} tokens takes {:.1f} MiB over {} layers, more than the whole pool of {} MiB: "
                      "enlarge it (--pool-mb) or make pages smaller (--page-size)",
                      stack.tokens_per_page_id(), page_bytes / (1 << 20), stack.num_layers, flags.pool_mb));
    }
  }
  if (pages > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("a pool of {} pages is more than page ids can number", pages));
  }
  return pages;
}

int replay_trace(ReplayFlags& flags) {
  replay::Workload workload;
  {
    const replay::Trace trace = replay::read_trace(flags.trace, flags.format);
    workload = replay::make_workload(trace, flags.scale, flags.requests);
    if (flags.count_prefix_hits) return count_hits(flags, trace, workload);
  }
  replay::ReplayOptions options;
  options.stack = flags.attention.stack(flags.scale);
  options.stack.backend = flags.backend;
  options.stack.ranks = flags.ranks;
  options.stack.dcp_interleave = flags.dcp_interleave;
  options.stack.dcp_comm_backend = flags.dcp_comm;
  options.stack.cascade = flags.cascade;
  options.stack.plan_only = flags.plan_only;
  if (!flags.kv_cache_dtype.empty())
    options.stack.kv = backends::kv_cache_dtype_from_name(flags.kv_cache_dtype, options.stack.out());
  if (flags.batch_invariant) options.stack.determinism = Determinism::kBatchInvariant;
  options.stack.seed = flags.seed;
  options.stack.num_pages = pool_pages(flags, workload, options.stack);
  options.stack.window_pages = flags.window_pages;
  options.stack.max_tokens = flags.scheduler.token_budget;
  options.scheduler = flags.scheduler;
  options.scheduler.page_size = options.stack.tokens_per_page_id();
  if (flags.serial) options.scheduler.max_running = 1;
  options.scheduler.drafts.seed = flags.seed;
  options.stack.draft_topk = flags.scheduler.drafts.topk;
  options.stack.max_requests = options.scheduler.max_running;
  options.clock = flags.clock;
  options.checks = flags.checks;
  options.checks.keep_samples = !flags.samples.empty();
  options.prefix_reuse = !flags.no_prefix_reuse;

  const MpiSession mpi;
  if (mpi.group() != nullptr) {
    if (flags.ranks == 1) throw Error(ErrorCode::kInvalidArgument, "mpirun started several processes; give --ranks");
    if (flags.clock.time_scale > 0.0)
      throw Error(ErrorCode::kUnsupported, "--time-scale: processes whose steps depend on the wall clock would part");
    options.processes = mpi.group();
  }
  flags.quiet = flags.quiet || !mpi.prints();

  ReplayOutputs outputs;
  if (mpi.prints()) outputs = open_outputs(flags);
  options.samples = outputs.samples ? &*outputs.samples : nullptr;
  options.timeline = outputs.timeline ? &*outputs.timeline : nullptr;

  Progress progress(flags.quiet);
  const replay::ReplayResult result = replay::run_replay(flags.attention.context(), workload, options,
                                                         interrupted_by_user(), [&](const replay::ReplayProgress& now) {
                                                           if (progress.due())
                                                             progress.show(replay::progress_line(now));
                                                         });
  progress.finish();
  // The summaries come first: a full disk under the larger files does not take them along.
  if (outputs.json) write_json(replay::summary_json(result), *outputs.json);
  const bool stdout_taken = flags.json == "-" || flags.samples == "-" || flags.timeline == "-";
  if (!flags.quiet) fmt::print(stdout_taken ? stderr : stdout, "{}", replay::summary_text(result));
  if (outputs.samples) outputs.samples->close();
  if (outputs.timeline) outputs.timeline->close();
  if (result.failed()) {
    fmt::print(
        stderr,
        "folio: the replay failed its checks: {} wrong rows, {} leaked pages, {} rows computed again with other bits\n",
        result.checks.failures, result.leaked_pages, result.checks.recomputed_unequal);
    return kCheckFailed;
  }
  return result.interrupted ? kInterrupted : kSuccess;
}

}  // namespace

Command add_replay_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("replay", "Serve a trace: batching, paging, prefix reuse and attention, checked");
  auto flags = std::make_shared<ReplayFlags>();
  add_workload_options(*command, *flags);
  add_serving_options(*command, *flags);
  flags->attention.add_to(*command, true);
  add_backend_options(*command, *flags);
  flags->page_size = command->get_option("--page-size");
  add_output_options(*command, *flags);
  add_cascade_option(*command, *flags);
  command->footer(
      "Keys and values are made from the tokens' hashes, queries from request and position: whatever the schedule, "
      "the\n"
      "results are the same, bit for bit with --determinism schedule-invariant (compare the digests).\n"
      "Example: folio replay examples/traces/mooncake_excerpt.jsonl --json result.json");
  return {command, [flags] { return replay_trace(*flags); }};
}

}  // namespace folio::cli
