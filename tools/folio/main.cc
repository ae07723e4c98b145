#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <new>

#include "commands.hpp"
#include "folio/types/error.hpp"
#include "folio/version.hpp"

namespace {

using folio::cli::Command;

int run(int argc, char** argv) {
  CLI::App app{"Folio: paged attention for LLM serving. Replays serving traces, checks and measures the library."};
  app.set_version_flag("--version", std::string("folio ") + folio::version());
  app.require_subcommand(1);
  app.footer(
      "'folio SUBCOMMAND --help' tells more. Exit codes: 0 all well; 1 a check failed; 2 options, input or output that "
      "cannot\n"
      "be used; 130 interrupted.");
  const std::vector<Command> commands = {folio::cli::add_replay_command(app),    folio::cli::add_report_command(app),
                                         folio::cli::add_info_command(app),      folio::cli::add_bench_command(app),
                                         folio::cli::add_verify_command(app),    folio::cli::add_man_command(app),
                                         folio::cli::add_completion_command(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? folio::cli::kSuccess : folio::cli::kUsage;
  }
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  return folio::cli::kUsage;
}

}  // namespace

int main(int argc, char** argv) {
  int code = folio::cli::kUsage;
  try {
    code = run(argc, argv);
  } catch (const folio::Error& error) {
    fmt::print(stderr, "folio: {}\n", error.what());
  } catch (const std::bad_alloc&) {
    std::fputs("folio: out of memory: ask for less (--pool-mb, --requests, --threads) or free some\n", stderr);
  } catch (const std::exception& error) {
    fmt::print(stderr, "folio: unexpected: {}\n", error.what());
  }
  std::cout.flush();  // CLI11 writes there
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    fmt::print(stderr, "folio: standard output: cannot be written: {}\n", std::strerror(errno));
    return folio::cli::kUsage;
  }
  return code;
}
