#include <fmt/format.h>

#include "folio/types/error.hpp"
#include "folio/version.hpp"
#include "option_table.hpp"

namespace folio::cli {
namespace {

/// Text as troff wants it: hyphens that can be copied, no line that begins with a request.
std::string troff(const std::string& text) {
  std::string safe;
  bool line_begins = true;
  for (const char c : text) {
    if (line_begins && (c == '.' || c == '\'')) safe += "\\&";
    switch (c) {
      case '\\': safe += "\\(rs"; break;
      case '-': safe += "\\-"; break;
      default: safe += c;
    }
    line_begins = c == '\n';
  }
  return safe;
}

/// A footer's lines as they are broken.
std::string as_lines(const std::string& text) {
  return ".nf\n" + troff(text) + "\n.fi\n";
}

std::string value_text(const OptionRow& option) {
  if (option.value.empty()) return {};
  return fmt::format(" \\fI{}\\fR{}", troff(option.value), option.several ? " ..." : "");
}

std::string option_text(const OptionRow& option) {
  std::string names;
  for (const std::string& name : option.names)
    names += fmt::format("{}\\fB{}\\fR", names.empty() ? "" : ", ", troff(name));
  if (names.empty()) names = fmt::format("\\fI{}\\fR", troff(option.positional));
  const char* const end = option.description.ends_with('.') ? "" : ".";
  std::string text = fmt::format(".TP\n{}{}\n{}{}", names, option.positional.empty() ? value_text(option) : "",
                                 troff(option.description), end);
  if (!option.choices.empty()) {
    std::string choices;
    for (const std::string& choice : option.choices)
      choices += fmt::format("{}\\fB{}\\fR", choices.empty() ? "" : ", ", troff(choice));
    text += fmt::format("\nTaken: {}.", choices);
  }
  if (!option.initial.empty()) text += fmt::format("\nThe default is \\fB{}\\fR.", troff(option.initial));
  if (option.required && option.positional.empty()) text += "\nIt must be given.";
  return text + "\n";
}

std::string heading(const std::string& name, const std::string& description) {
  std::string upper = name;
  for (char& c : upper) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return fmt::format(".TH \"{}\" 1 \"\" \"folio {}\" \"Folio\"\n.SH NAME\n{} \\- {}\n", troff(upper), version(),
                     troff(name), troff(description));
}

std::string page_of_command(const CommandRow& command, const std::vector<CommandRow>& all) {
  std::string page = heading("folio-" + command.name, command.description);
  page += fmt::format(".SH SYNOPSIS\n\\fBfolio {}\\fR [\\fIOPTIONS\\fR]", command.name);
  std::string arguments, options;
  for (const OptionRow& option : command.options) {
    if (!option.positional.empty())
      page += fmt::format(" \\fI{}\\fR{}", troff(option.positional), option.several ? " ..." : "");
    (option.positional.empty() ? options : arguments) += option_text(option);
  }
  page += "\n";
  if (!arguments.empty()) page += ".SH ARGUMENTS\n" + arguments;
  page += ".SH OPTIONS\n" + options;
  if (!command.footer.empty()) page += ".SH NOTES\n" + as_lines(command.footer);
  page += ".SH SEE ALSO\n\\fBfolio\\fR(1)";
  for (const CommandRow& other : all) {
    if (other.name != command.name) page += fmt::format(",\n\\fBfolio\\-{}\\fR(1)", troff(other.name));
  }
  return page + "\n";
}

std::string page_of_program(const CLI::App& app, const std::vector<CommandRow>& commands) {
  const CommandRow program = table_of(app);
  std::string page = heading("folio", "paged attention for LLM serving");
  page += ".SH SYNOPSIS\n\\fBfolio\\fR \\fISUBCOMMAND\\fR [\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n" +
          troff(program.description) + "\n.SH SUBCOMMANDS\n";
  for (const CommandRow& command : commands) {
    page += fmt::format(".TP\n\\fBfolio\\-{}\\fR(1)\n{}\n", troff(command.name), troff(command.description));
  }
  page += ".SH OPTIONS\n";
  for (const OptionRow& option : program.options) page += option_text(option);
  page +=
      ".SH ENVIRONMENT\n"
      ".TP\n\\fBFOLIO_FORCE_KERNEL\\fR\nThe attention kernel to use, by name; \\fB\\-\\-kernel\\fR wins over it.\n"
      ".TP\n\\fBFOLIO_MAX_CPU_ISA\\fR\nHides the kernels of newer instruction sets: generic, avx2, avx512, "
      "avx512_bf16, amx; "
      "on AArch64 generic, bf16.\n"
      ".TP\n\\fBFOLIO_VALIDATE_TABLES\\fR\n1: every run checks its page tables.\n";
  return page + ".SH NOTES\n" + as_lines(program.footer);
}

}  // namespace

std::string manual_page(const CLI::App& app, const std::string& subcommand) {
  const std::vector<CommandRow> commands = tables_of_subcommands(app);
  if (subcommand.empty()) return page_of_program(app, commands);
  std::string names;
  for (const CommandRow& command : commands) {
    if (command.name == subcommand) return page_of_command(command, commands);
    names += (names.empty() ? "" : ", ") + command.name;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("no subcommand is called '{}'; there are {}", subcommand, names));
}

}  // namespace folio::cli
