#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

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
      "'folio SUBCOMMAND --help' tells more. Exit codes: 0 all well; 1 a check failed; 2 options or input that cannot "
      "be\n"
      "used; 130 interrupted.");
  const std::vector<Command> commands = {folio::cli::add_replay_command(app), folio::cli::add_info_command(app),
                                         folio::cli::add_bench_command(app), folio::cli::add_verify_command(app)};
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
  try {
    return run(argc, argv);
  } catch (const folio::Error& error) {
    fmt::print(stderr, "folio: {}\n", error.what());
  } catch (const std::exception& error) {
    fmt::print(stderr, "folio: unexpected: {}\n", error.what());
  }
  return folio::cli::kUsage;
}
