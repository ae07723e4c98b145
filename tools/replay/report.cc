#include "replay/report.hpp"

#include <fmt/format.h>

#include "replay/eta.hpp"

namespace folio::replay {
namespace {

double share(double part, double whole) {
  return whole > 0.0 ? part / whole : 0.0;
}

double mib(double bytes) {
  return bytes / (1024.0 * 1024.0);
}

/// Resident memory beyond the pool and the workspace.
int64_t other_resident_bytes(const ReplayResult& r) {
  return r.peak_resident_bytes - static_cast<int64_t>(r.touched_bytes);
}

double hit_rate(const ReplayResult& r) {
  return share(static_cast<double>(r.scheduler.hit_tokens), static_cast<double>(r.input_tokens));
}

/// Tokens that a request gained each time its drafts were verified.
double tokens_per_verification(const ReplayResult& r) {
  return 1.0 + share(static_cast<double>(r.scheduler.accepted_drafts), static_cast<double>(r.scheduler.verified_trees));
}

double read_rate_of_run(const ReplayResult& r) {
  return share(static_cast<double>(r.work.kv_bytes_read), r.times[Phase::kRun]);
}

double multiply_rate_of_run(const ReplayResult& r) {
  return share(r.work.flops, r.times[Phase::kRun]);
}

std::string against(double value, double limit, const char* unit) {
  if (limit <= 0.0) return fmt::format("{:.2f} {} (limit not measured)", value / 1e9, unit);
  return fmt::format("{:.2f} {}, {:.0f}% of the {:.1f} measured here", value / 1e9, unit, 100.0 * value / limit,
                     limit / 1e9);
}

/// ", flashinfer backend, 2 ranks": what stands between the replay and the core.
std::string served_by(const ReplayResult& r) {
  if (r.backend == ServingBackend::kNone) return {};
  const std::string ranks = r.ranks > 1 ? fmt::format(", {} ranks", r.ranks) : "";
  return fmt::format(", {} backend{}", to_string(r.backend), ranks);
}

/// Of the KV that requests alone would read.
double saved_share(const ReplayResult& r) {
  return 1.0 - share(static_cast<double>(r.work.kv_bytes_read), static_cast<double>(r.work.kv_bytes_read_alone));
}

std::string cascade_text(const ReplayResult& r) {
  if (r.attention.determinism >= Determinism::kBatchInvariant) {
    return fmt::format("{}, but nothing is shared with --determinism {}: it would depend on the other requests",
                       to_string(r.cascade), to_string(r.attention.determinism));
  }
  return fmt::format("{}: {:.1f} MiB of KV read instead of {:.1f} ({:.1f}% less), shared prefixes in {} of {} plans",
                     to_string(r.cascade), mib(static_cast<double>(r.work.kv_bytes_read)),
                     mib(static_cast<double>(r.work.kv_bytes_read_alone)), 100.0 * saved_share(r),
                     r.work.plans_with_cascade, r.work.plans);
}

std::string duration(double seconds) {
  if (seconds >= 1.0) return fmt::format("{:.4g} s", seconds);
  return seconds >= 1e-3 ? fmt::format("{:.4g} ms", seconds * 1e3) : fmt::format("{:.4g} us", seconds * 1e6);
}

/// Whose time latencies are in.
std::string clock_text(const ReplayResult& r) {
  switch (r.clock) {
    case ClockKind::kFixed: return fmt::format("simulated steps of {:g} ms; --clock measured for real ones", r.step_ms);
    case ClockKind::kMeasured: return "steps as measured, without inputs and checks";
    case ClockKind::kWall: return "wall clock times --time-scale";
  }
  return {};
}

std::string latency_text(const ReplayResult& r) {
  std::string text = fmt::format("  {:<12}{}\n", "latency", clock_text(r));
  const auto line = [&](const char* name, const LatencyDistribution& latency) {
    const Percentiles& p = latency.percentiles;
    if (latency.count == 0) return;
    fmt::format_to(std::back_inserter(text), "    {:<10}{} median, {} p90, {} p99, {} mean\n", name, duration(p.p50),
                   duration(p.p90), duration(p.p99), duration(p.mean));
  };
  line("TTFT", r.latencies.ttft);
  line("TBT", r.latencies.tbt);
  line("TPOT", r.latencies.tpot);
  line("E2E", r.latencies.e2e);
  return text;
}

nlohmann::ordered_json json_of(const LatencyDistribution& latency) {
  const Percentiles& p = latency.percentiles;
  return {
      {"count", latency.count},        {"mean", p.mean}, {"p50", p.p50}, {"p90", p.p90}, {"p99", p.p99}, {"max", p.max},
      {"quantiles", latency.quantiles}};
}

nlohmann::ordered_json latency_json(const ReplayResult& r) {
  nlohmann::ordered_json json = {{"clock", to_string(r.clock)}};
  if (r.clock == ClockKind::kFixed) json["step_s"] = r.step_ms / 1e3;
  json["ttft_s"] = json_of(r.latencies.ttft);
  json["tbt_s"] = json_of(r.latencies.tbt);
  json["tpot_s"] = json_of(r.latencies.tpot);
  json["e2e_s"] = json_of(r.latencies.e2e);
  return json;
}

/// One array a column: a fraction of the size of objects.
nlohmann::ordered_json series_json(const StepSeries& series) {
  nlohmann::ordered_json json = {{"steps_per_point", series.steps_per_point()},
                                 {"most_points", StepSeries::kMostPoints}};
  const auto column = [&](const std::string& name, const auto& value) {
    nlohmann::ordered_json& values = json[name] = nlohmann::ordered_json::array();
    for (const StepPoint& point : series.points()) values.push_back(value(point));
  };
  column("step", [](const StepPoint& p) { return p.step; });
  column("steps", [](const StepPoint& p) { return p.steps; });
  column("start_s", [](const StepPoint& p) { return p.start_ms / 1e3; });
  column("end_s", [](const StepPoint& p) { return p.end_ms / 1e3; });
  column("decoding", [](const StepPoint& p) { return p.decoding; });
  column("prefilling", [](const StepPoint& p) { return p.prefilling; });
  column("waiting", [](const StepPoint& p) { return p.waiting; });
  column("query_tokens", [](const StepPoint& p) { return p.query_tokens; });
  column("kv_tokens", [](const StepPoint& p) { return p.kv_tokens; });
  column("prefix_hits", [](const StepPoint& p) { return p.prefix_hits; });
  column("pages_held", [](const StepPoint& p) { return p.pages_held; });
  column("pages_cached", [](const StepPoint& p) { return p.pages_cached; });
  column("duration_s", [](const StepPoint& p) { return p.times.serving(); });
  for (size_t phase = 0; phase < kPhaseNames.size(); ++phase) {
    column(std::string(kPhaseNames[phase]) + "_s", [phase](const StepPoint& p) { return p.times.seconds[phase]; });
  }
  return json;
}

}  // namespace

std::string_view to_string(Determinism determinism) {
  switch (determinism) {
    case Determinism::kNone: return "none";
    case Determinism::kRunToRun: return "run-to-run";
    case Determinism::kBatchInvariant: return "batch-invariant";
    case Determinism::kScheduleInvariant: return "schedule-invariant";
  }
  return "invalid";
}

std::string progress_line(const ReplayProgress& p) {
  return fmt::format(
      "{}/{} requests, {} running, {} waiting, {} tokens, {} from the cache, {:.0f} tokens/s, t = {:.0f} s{}",
      p.finished, p.requests, p.running, p.waiting, p.computed_tokens, p.hit_tokens,
      share(static_cast<double>(p.computed_tokens), p.wall_seconds), p.simulated_ms / 1e3,
      eta(p.share, p.wall_seconds));
}

std::string summary_text(const ReplayResult& r) {
  std::string text;
  const auto line = [&](const char* label, const std::string& value) {
    fmt::format_to(std::back_inserter(text), "  {:<12}{}\n", label, value);
  };
  const AttentionConfig& a = r.attention;
  text += r.interrupted ? "interrupted; so far:\n" : "replay finished:\n";
  line("attention",
       fmt::format("{} q heads, {} kv heads, head dim {}/{}, q {}, kv {} {}, page {}, {}, kernel {}, {} {}{}",
                   a.num_q_heads, a.num_kv_heads, a.head_dim_qk, a.head_dim_v, to_string(a.q), to_string(a.kv),
                   to_string(a.kv_format), a.page_size, to_string(a.determinism), r.kernel, r.threads,
                   r.on_gpu ? "SMs" : "threads", served_by(r)));
  line("requests",
       fmt::format("{} of {} finished, {} steps, {:.1f} s simulated, {:.2f} s wall", r.progress.finished,
                   r.progress.requests, r.progress.steps, r.progress.simulated_ms / 1e3, r.progress.wall_seconds));
  line("tokens", fmt::format("{} prompt, {} generated; {} computed in each layer", r.input_tokens, r.output_tokens,
                             r.scheduler.computed_tokens));
  line("prefix hits",
       fmt::format("{} of {} prompt tokens ({:.1f}%)", r.scheduler.hit_tokens, r.input_tokens, 100.0 * hit_rate(r)));
  line("pages", fmt::format("{}, at most {} held, {} evictions, {} preemptions, {} leaked", r.pages, r.peak_pages_held,
                            r.evictions, r.scheduler.preemptions, r.leaked_pages));
  if (r.window.pages > 0) {
    line("window", fmt::format("{} pages of layers with the window, at most {} held; {} tokens given up before their "
                               "request ended, {} evicted",
                               r.window.pages, r.window.held, r.window.left, r.window.evicted));
  }
  if (r.scheduler.verified_trees > 0) {
    line("drafts", fmt::format("{} verified, {} drafted tokens accepted: {:.2f} tokens a step and request",
                               r.scheduler.verified_trees, r.scheduler.accepted_drafts, tokens_per_verification(r)));
  }
  line("step", fmt::format("{:.2f} ms median, {:.2f} p90, {:.2f} p99, {:.2f} max (without inputs and checks)",
                           r.step_seconds.p50 * 1e3, r.step_seconds.p90 * 1e3, r.step_seconds.p99 * 1e3,
                           r.step_seconds.max * 1e3));
  text += latency_text(r);
  std::string times;
  for (size_t phase = 0; phase < kPhaseNames.size(); ++phase) {
    fmt::format_to(std::back_inserter(times), "{}{} {:.3f} s", phase == 0 ? "" : ", ", kPhaseNames[phase],
                   r.times.seconds[phase]);
  }
  line("time in", times);
  if (r.cascade != backends::CascadeMode::kOff) line("cascade", cascade_text(r));
  if (r.plan_only) {
    line("planned", fmt::format("{:.1f} MiB of KV to read, {:.1f} GFLOP; no attention was computed",
                                mib(static_cast<double>(r.work.kv_bytes_read)), r.work.flops / 1e9));
    return text;
  }
  line("kv read", against(read_rate_of_run(r), r.read_limit, "GB/s"));
  line("arithmetic", against(multiply_rate_of_run(r), r.multiply_limit, "GFLOP/s"));
  line("memory",
       fmt::format(
           "peak {:.0f} MiB resident: {:.0f} of the pool's {:.0f} MiB and the workspace's {:.1f}, {:.0f} besides",
           mib(static_cast<double>(r.peak_resident_bytes)), mib(static_cast<double>(r.touched_bytes)),
           mib(static_cast<double>(r.pool_bytes)), mib(static_cast<double>(r.workspace_bytes)),
           mib(static_cast<double>(other_resident_bytes(r)))));
  line("checked",
       fmt::format("{} rows against the float64 oracle, {} wrong, worst error {:.3g} ({:.0f}% of what is allowed)",
                   r.checks.rows, r.checks.failures, r.checks.worst_error, 100.0 * r.checks.worst_share));
  if (!r.checks.first_failure.empty()) line("", "first: " + r.checks.first_failure);
  line("digest", fmt::format("{:016x} over {} rows; {} computed again, {} with other bits", r.digest,
                             r.checks.digested_rows, r.checks.recomputed_rows, r.checks.recomputed_unequal));
  return text;
}

nlohmann::ordered_json summary_json(const ReplayResult& r) {
  const AttentionConfig& a = r.attention;
  nlohmann::ordered_json json;
  json["interrupted"] = r.interrupted;
  json["failed"] = r.failed();
  if (r.plan_only) json["plan_only"] = true;
  json["attention"] = {{"num_q_heads", a.num_q_heads},
                       {"num_kv_heads", a.num_kv_heads},
                       {"head_dim_qk", a.head_dim_qk},
                       {"head_dim_v", a.head_dim_v},
                       {"q", to_string(a.q)},
                       {"kv", to_string(a.kv)},
                       {"out", to_string(a.out)},
                       {"kv_format", to_string(a.kv_format)},
                       {"page_size", a.page_size},
                       {"determinism", to_string(a.determinism)},
                       {"kernel", r.kernel},
                       {"device", r.on_gpu ? "cuda" : "cpu"},
                       {"threads", r.threads},
                       {"backend", to_string(r.backend)},
                       {"ranks", r.ranks}};
  json["requests"] = {
      {"total", r.progress.requests}, {"finished", r.progress.finished}, {"preemptions", r.scheduler.preemptions}};
  json["tokens"] = {{"prompt", r.input_tokens},
                    {"generated", r.output_tokens},
                    {"computed", r.scheduler.computed_tokens},
                    {"prefix_hits", r.scheduler.hit_tokens},
                    {"prefix_hits_on_resume", r.scheduler.resumed_hit_tokens},
                    {"prefix_hit_rate", hit_rate(r)}};
  if (r.scheduler.verified_trees > 0) {
    json["drafts"] = {{"verified", r.scheduler.verified_trees},
                      {"accepted_tokens", r.scheduler.accepted_drafts},
                      {"tokens_per_step", tokens_per_verification(r)}};
  }
  json["pages"] = {
      {"total", r.pages}, {"peak_held", r.peak_pages_held}, {"evictions", r.evictions}, {"leaked", r.leaked_pages}};
  if (r.window.pages > 0) {
    json["window_pages"] = {{"total", r.window.pages},
                            {"peak_held", r.window.held},
                            {"tokens_given_up", r.window.left},
                            {"tokens_evicted", r.window.evicted}};
  }
  json["steps"] = {{"count", r.progress.steps},   {"p50_s", r.step_seconds.p50}, {"p90_s", r.step_seconds.p90},
                   {"p99_s", r.step_seconds.p99}, {"max_s", r.step_seconds.max}, {"mean_s", r.step_seconds.mean}};
  json["latency"] = latency_json(r);
  nlohmann::ordered_json times;
  for (size_t phase = 0; phase < kPhaseNames.size(); ++phase)
    times[std::string(kPhaseNames[phase]) + "_s"] = r.times.seconds[phase];
  times["wall_s"] = r.progress.wall_seconds;
  times["simulated_s"] = r.progress.simulated_ms / 1e3;
  json["times"] = times;
  json["work"] = {{"flop", r.work.flops},
                  {"kv_bytes_read", r.work.kv_bytes_read},
                  {"kv_bytes_written", r.work.kv_bytes_written},
                  {"kv_read_bytes_per_s", read_rate_of_run(r)},
                  {"flop_per_s", multiply_rate_of_run(r)},
                  {"read_limit_bytes_per_s", r.read_limit},
                  {"multiply_limit_flop_per_s", r.multiply_limit}};
  if (r.cascade != backends::CascadeMode::kOff) {
    json["cascade"] = {{"mode", to_string(r.cascade)},
                       {"plans", r.work.plans},
                       {"plans_with_cascade", r.work.plans_with_cascade},
                       {"kv_bytes_read", r.work.kv_bytes_read},
                       {"kv_bytes_read_without", r.work.kv_bytes_read_alone}};
  }
  json["memory"] = {{"peak_rss", r.peak_resident_bytes},
                    {"pool_bytes", r.pool_bytes},
                    {"workspace_bytes", r.workspace_bytes},
                    {"pool_and_workspace_resident", r.touched_bytes},
                    {"other_bytes", other_resident_bytes(r)}};
  json["checks"] = {{"rows", r.checks.rows},
                    {"failures", r.checks.failures},
                    {"worst_error", r.checks.worst_error},
                    {"worst_share_of_allowed", r.checks.worst_share},
                    {"first_failure", r.checks.first_failure},
                    {"digest", fmt::format("{:016x}", r.digest)},
                    {"digested_rows", r.checks.digested_rows},
                    {"recomputed_rows", r.checks.recomputed_rows},
                    {"recomputed_unequal", r.checks.recomputed_unequal}};
  json["series"] = series_json(r.series);
  return json;
}

}  // namespace folio::replay
