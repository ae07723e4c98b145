#include <fmt/format.h>

#include "folio/types/error.hpp"
#include "option_table.hpp"

namespace folio::cli {
namespace {

/// What fits beside an option in a list: the description up to its first colon, semicolon or parenthesis.
std::string brief(const std::string& description) {
  constexpr size_t kMost = 70;
  std::string text = description.substr(0, description.find_first_of(":;("));
  while (!text.empty() && text.back() == ' ') text.pop_back();
  if (text.size() <= kMost) return text;
  return text.substr(0, text.rfind(' ', kMost));
}

std::string joined(const std::vector<std::string>& words, const std::string& between = " ") {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

/// All names of options, those of flags too.
std::string option_names(const CommandRow& command) {
  std::string names;
  for (const OptionRow& option : command.options) {
    for (const std::string& name : option.names) names += (names.empty() ? "" : " ") + name;
  }
  return names;
}

bool takes_files(const CommandRow& command) {
  for (const OptionRow& option : command.options) {
    if (!option.positional.empty() && option.takes_file()) return true;
  }
  return false;
}

/// What a positional argument takes, where it is one of few words.
std::vector<std::string> argument_choices(const CommandRow& command) {
  for (const OptionRow& option : command.options) {
    if (!option.positional.empty() && !option.choices.empty()) return option.choices;
  }
  return {};
}

std::string bash(const CommandRow& program, const std::vector<CommandRow>& commands) {
  std::vector<std::string> names;
  std::string values, options;
  for (const CommandRow& command : commands) {
    names.push_back(command.name);
    for (const OptionRow& option : command.options) {
      if (option.value.empty() || option.names.empty()) continue;
      std::vector<std::string> patterns;
      for (const std::string& name : option.names) patterns.push_back(fmt::format("'{} {}'", command.name, name));
      std::string words;
      if (option.takes_file()) words = R"(compgen -f -- "$current")";
      if (!option.choices.empty()) words = fmt::format(R"(compgen -W '{}' -- "$current")", joined(option.choices));
      values += fmt::format("    {}) {}return ;;\n", joined(patterns, " | "),
                            words.empty() ? "" : fmt::format("mapfile -t COMPREPLY < <({}); ", words));
    }
    const std::vector<std::string> choices = argument_choices(command);
    std::string otherwise = ":";
    if (takes_files(command)) otherwise = R"(mapfile -t COMPREPLY < <(compgen -f -- "$current"))";
    if (!choices.empty())
      otherwise = fmt::format(R"(mapfile -t COMPREPLY < <(compgen -W '{}' -- "$current"))", joined(choices));
    options += fmt::format(
        "    {})\n"
        "      if [[ $current == -* ]]; then mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$current\"); else {}; fi "
        ";;\n",
        command.name, option_names(command), otherwise);
  }
  return fmt::format(
      R"(# Completion of folio for bash, made from its option tables by `folio completion bash`.
_folio() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} command='' word
  COMPREPLY=()
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD - 1}}"; do
    case $word in {}) command=$word; break ;; esac
  done
  case "$command $previous" in
{}  esac
  case $command in
    '') mapfile -t COMPREPLY < <(compgen -W '{} {}' -- "$current") ;;
{}  esac
}}
complete -o filenames -F _folio folio
)",
      joined(names, " | "), values, joined(names), option_names(program), options);
}

/// Within single quotes.
std::string quoted(const std::string& text, const std::string& also_escaped = {}) {
  std::string safe;
  for (const char c : text) {
    if (c == '\'') {
      safe += "'\\''";
    } else {
      if (also_escaped.find(c) != std::string::npos) safe += '\\';
      safe += c;
    }
  }
  return safe;
}

std::string zsh_value(const OptionRow& option) {
  if (!option.choices.empty()) return fmt::format(":{}:({})", option.value, joined(option.choices));
  return fmt::format(":{}:{}", option.value, option.takes_file() ? "_files" : " ");
}

std::string zsh(const CommandRow&, const std::vector<CommandRow>& commands) {
  std::string names, cases;
  for (const CommandRow& command : commands) {
    names += fmt::format("    '{}:{}'\n", command.name, quoted(brief(command.description), ":"));
    std::string specs;
    for (const OptionRow& option : command.options) {
      if (!option.positional.empty()) {
        specs += fmt::format(" \\\n        '{}{}'", option.several ? "*" : "", zsh_value(option));
        continue;
      }
      const std::string text = quoted(brief(option.description), "[]:");
      const std::string value = option.value.empty() ? "" : zsh_value(option);
      for (const std::string& name : option.names)
        specs += fmt::format(" \\\n        '{}{}[{}]{}'",
                             option.names.size() > 1 ? "(" + joined(option.names) + ")" : "", name, text, value);
    }
    cases += fmt::format("      {})\n        _arguments{} ;;\n", command.name, specs);
  }
  return fmt::format(
      R"(#compdef folio
# Completion of folio for zsh, made from its option tables by `folio completion zsh`.
_folio() {{
  local state line
  local -a commands
  commands=(
{}  )
  _arguments -C '(- *)--help[print the help]' '(- *)--version[print the version]' '1:subcommand:->subcommand' '*::argument:->arguments'
  case $state in
    subcommand) _describe -t commands subcommand commands ;;
    arguments)
      case $line[1] in
{}      esac ;;
  esac
}}
if [ "$funcstack[1]" = _folio ]; then _folio "$@"; else compdef _folio folio; fi
)",
      names, cases);
}

std::string fish(const CommandRow&, const std::vector<CommandRow>& commands) {
  std::string text =
      "# Completion of folio for fish, made from its option tables by `folio completion fish`.\n"
      "complete -c folio -f\n"
      "complete -c folio -n __fish_use_subcommand -l help -d 'print the help'\n"
      "complete -c folio -n __fish_use_subcommand -l version -d 'print the version'\n";
  for (const CommandRow& command : commands) {
    text += fmt::format("complete -c folio -n __fish_use_subcommand -a {} -d '{}'\n", command.name,
                        quoted(brief(command.description)));
    const std::string where = fmt::format("complete -c folio -n '__fish_seen_subcommand_from {}'", command.name);
    for (const OptionRow& option : command.options) {
      if (!option.positional.empty()) {
        if (option.takes_file()) text += where + " -F\n";
        if (!option.choices.empty()) text += fmt::format("{} -a '{}'\n", where, joined(option.choices));
        continue;
      }
      text += where;
      for (const std::string& name : option.names)
        text += name[1] == '-' ? fmt::format(" -l {}", name.substr(2)) : fmt::format(" -s {}", name.substr(1));
      if (!option.choices.empty()) {
        text += fmt::format(" -x -a '{}'", joined(option.choices));
      } else if (!option.value.empty()) {
        text += option.takes_file() ? " -r -F" : " -x";
      }
      text += fmt::format(" -d '{}'\n", quoted(brief(option.description), "\\"));
    }
  }
  return text;
}

}  // namespace

std::string completion_script(const CLI::App& app, const std::string& shell) {
  const CommandRow program = table_of(app);
  const std::vector<CommandRow> commands = tables_of_subcommands(app);
  if (shell == "bash") return bash(program, commands);
  if (shell == "zsh") return zsh(program, commands);
  if (shell == "fish") return fish(program, commands);
  throw Error(ErrorCode::kInvalidArgument, fmt::format("shell is '{}'; bash, zsh and fish are offered", shell));
}

}  // namespace folio::cli
