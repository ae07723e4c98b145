"""Mistakes in what replays tell, and in what the core logs; see mutations.py."""

from mutations import plant

REPLAY = "tools/replay/"
LATENCY = REPLAY + "latency.cc"
SERIES = REPLAY + "step_series.cc"
LOG = "src/attention/log.cc"

rule = "latencies and series of a replay"
plant(rule, "ttft-ends-with-the-first-chunk", LATENCY, "if (tokens <= state.tokens) continue;", "if (tokens <= state.tokens && item.first > 0) continue;")
plant(rule, "ttft-from-the-replays-begin", LATENCY, "ttft_.push_back(seconds_between(request.arrival_ms, now_ms));",
      "ttft_.push_back(seconds_between(0.0, now_ms));")
plant(rule, "tpot-over-all-tokens", LATENCY, "/ static_cast<float>(tokens - 1)", "/ static_cast<float>(tokens)")
plant(rule, "tbt-after-a-preemption-anew", LATENCY, "    state.tokens = tokens;\n", "    state.tokens = item.first == 0 ? 0 : tokens;\n")
plant(rule, "series-pages-summed", SERIES, "point.pages_held = std::max(point.pages_held, next.pages_held);", "point.pages_held += next.pages_held;")
plant(rule, "series-mean-without-weights", SERIES, "const auto weight = static_cast<double>(point.steps);", "const auto weight = static_cast<double>(next.steps);")
plant(rule, "measured-clock-with-fixed-steps", REPLAY + "simulated_clock.hpp",
      "options_.kind == ClockKind::kMeasured ? serving_seconds * 1e3", "options_.kind == ClockKind::kWall ? serving_seconds * 1e3")
plant(rule, "request-rate-by-one-too-many", REPLAY + "workload.cc", "static_cast<double>(workload.requests.size() - 1) / per_second",
      "static_cast<double>(workload.requests.size()) / per_second")

rule = "the log of the core"
plant(rule, "log-level-not-looked-at", LOG, "static_cast<int32_t>(level) >= listener().least.load(std::memory_order_relaxed)",
      "listener().least.load(std::memory_order_relaxed) != kNobody")
plant(rule, "log-held-during-the-call", LOG, "  if (callback != nullptr) (*callback)(level, line);\n",
      "  const std::lock_guard lock(listener().mutex);\n  if (callback != nullptr) (*callback)(level, line);\n")
plant(rule, "log-goes-on-without-a-listener", LOG, "  listener().callback.swap(kept);\n", "  if (!silent) listener().callback.swap(kept);\n",
      LOG, "silent ? kNobody : static_cast<int32_t>(least)", "static_cast<int32_t>(least)")
