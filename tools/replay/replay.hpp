#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "folio/folio.hpp"
#include "replay/attention_stack.hpp"
#include "replay/latency.hpp"
#include "replay/row_checker.hpp"
#include "replay/scheduler.hpp"
#include "replay/simulated_clock.hpp"
#include "replay/step_series.hpp"
#include "replay/workload.hpp"

namespace folio::replay {

struct ReplayOptions {
  StackConfig stack;  ///< num_pages, max_tokens and page_size included
  SchedulerOptions scheduler;
  ClockOptions clock;
  CheckOptions checks;
  bool prefix_reuse = true;
  /// Ranks of decode context parallelism in other processes, which run the same replay; null = threads. Borrowed.
  distributed::ProcessGroup* processes = nullptr;
  OutputFile* samples = nullptr;   ///< null = none. Borrowed, and the caller closes it
  OutputFile* timeline = nullptr;  ///< the same
};

/// Where a replay stands.
struct ReplayProgress {
  int64_t requests = 0, finished = 0, running = 0, waiting = 0;
  int64_t computed_tokens = 0, hit_tokens = 0, preemptions = 0;
  int64_t steps = 0;
  double simulated_ms = 0.0;
  double wall_seconds = 0.0;
  double share =
      0.0;  ///< of the workload's tokens that is done; with ClockKind::kWall at most that of the arrivals' time
};

/// What a replay came to. Seconds are wall time.
struct ReplayResult {
  ReplayProgress progress;
  bool interrupted = false;
  SchedulerCounters scheduler;
  PhaseTimes times;
  WorkCounts work;
  CheckCounts checks;
  uint64_t digest = 0;
  Percentiles step_seconds;  ///< schedule, write, plan and run of a step; without inputs and checks
  ClockKind clock = ClockKind::kFixed;
  double step_ms = 0.0;  ///< of ClockKind::kFixed
  Latencies latencies;   ///< on the simulated clock
  StepSeries series;
  int64_t input_tokens = 0;  ///< of the workload
  int64_t output_tokens = 0;
  int32_t pages = 0;
  int32_t peak_pages_held = 0;
  int64_t evictions = 0;
  WindowUse window;          ///< of the whole run; `held`: of windowed layers' pages, at most
  int64_t leaked_pages = 0;  ///< held although no request is left
  size_t pool_bytes = 0;
  size_t workspace_bytes = 0;
  size_t touched_bytes = 0;         ///< of pool and workspace: what is resident
  int64_t peak_resident_bytes = 0;  ///< of the process
  std::string kernel;
  AttentionConfig attention;
  ServingBackend backend = ServingBackend::kNone;
  int32_t ranks = 1;       ///< of decode context parallelism
  bool plan_only = false;  ///< no attention: there are no times of it, no rows and no digest
  backends::CascadeMode cascade = backends::CascadeMode::kOff;
  int32_t threads = 0;  ///< of a GPU its SMs
  bool on_gpu = false;
  double read_limit = 0.0;  ///< bytes a second, the best plain read of the pool's used pages; 0 = not measured
  /// Operations a second, with operands in registers, of the unit that computes `kernel`'s products; 0 = not measured.
  double multiply_limit = 0.0;

  /// True if a check failed, pages leaked, or rows that must agree did not.
  bool failed() const;
};

/// Replays a workload. `stop`: checked between steps; set, the replay ends with what it has. `report` is called after
/// each step. Throws folio::Error for options that cannot be (before the first step).
ReplayResult run_replay(const Context& context, const Workload& workload, const ReplayOptions& options,
                        const std::atomic<bool>& stop, const std::function<void(const ReplayProgress&)>& report);

}  // namespace folio::replay
