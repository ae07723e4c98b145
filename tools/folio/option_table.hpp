#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace folio::cli {

/// An option or a positional argument, as its command declared it.
struct OptionRow {
  std::vector<std::string> names;  ///< "-q", "--quiet"; empty for a positional argument
  std::string positional;          ///< "trace"; empty for an option
  std::string description;
  std::string value;                 ///< "FORMAT", "INT"; empty for a flag
  std::vector<std::string> choices;  ///< the values that are taken, where they are few
  std::string initial;               ///< the default as text; empty: none is told
  bool required = false;
  bool several = false;  ///< takes more than one value

  bool takes_file() const { return value == "FILE"; }
};

struct CommandRow {
  std::string name, description, footer;
  std::vector<OptionRow> options;
};

/// What manual pages and shell completions are made from: the tables that the command line is parsed by.
CommandRow table_of(const CLI::App& command);
std::vector<CommandRow> tables_of_subcommands(const CLI::App& app);

/// The manual page of a subcommand, or of the program for the app itself: troff with the macros of man(7).
std::string manual_page(const CLI::App& app, const std::string& subcommand);

/// A completion script. `shell`: bash, zsh or fish.
std::string completion_script(const CLI::App& app, const std::string& shell);

}  // namespace folio::cli
