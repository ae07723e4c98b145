#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <vector>

namespace folio::cli {

/// What the program returns.
enum ExitCode : int {
  kSuccess = 0,
  kCheckFailed = 1,   ///< a result was wrong, or pages leaked
  kUsage = 2,         ///< options, input or output that cannot be used; standard error says why
  kInterrupted = 130  ///< SIGINT; what was done so far has been reported
};

/// A subcommand: `run` is called after its options were parsed, and returns an ExitCode. It may throw folio::Error.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

/// Each adds one subcommand with its options. One file per subcommand.
Command add_replay_command(CLI::App& app);
Command add_info_command(CLI::App& app);
Command add_bench_command(CLI::App& app);
Command add_verify_command(CLI::App& app);
Command add_report_command(CLI::App& app);
Command add_man_command(CLI::App& app);
Command add_completion_command(CLI::App& app);

}  // namespace folio::cli
