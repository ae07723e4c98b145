#include <fmt/format.h>

#include <memory>

#include "commands.hpp"
#include "option_table.hpp"

namespace folio::cli {

Command add_man_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("man", "Write a manual page, for 'man -l -'");
  auto subcommand = std::make_shared<std::string>();
  command->add_option("subcommand", *subcommand, "whose page; the program's if not given");
  command->footer("Example: folio man replay | man -l -");
  return {command, [&app, subcommand] {
            fmt::print("{}", manual_page(app, *subcommand));
            return kSuccess;
          }};
}

Command add_completion_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("completion", "Write a shell's completion script");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash, zsh or fish")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer("Example: source <(folio completion bash)");
  return {command, [&app, shell] {
            fmt::print("{}", completion_script(app, *shell));
            return kSuccess;
          }};
}

}  // namespace folio::cli
