#include "option_table.hpp"

#include <sstream>

namespace folio::cli {
namespace {

/// "{a,b,c}" within a type's text, which is how CLI11 tells what IsMember takes.
std::vector<std::string> choices_of(const std::string& type) {
  std::vector<std::string> choices;
  const size_t begin = type.find('{'), end = type.find('}');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return choices;
  std::istringstream list(type.substr(begin + 1, end - begin - 1));
  for (std::string choice; std::getline(list, choice, ',');) choices.push_back(choice);
  return choices;
}

OptionRow row_of(const CLI::Option& option) {
  OptionRow row;
  for (const std::string& name : option.get_snames()) row.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) row.names.push_back("--" + name);
  if (row.names.empty()) row.positional = option.get_name(true);
  row.description = option.get_description();
  const bool is_flag = option.get_expected_min() == 0 && option.get_type_size() == 0;
  if (!is_flag && option.get_items_expected_max() > 0) {
    const std::string type = option.get_type_name();
    row.choices = choices_of(type);
    row.value = type.substr(0, type.find_first_of(":{ "));
    if (row.value.empty()) row.value = "VALUE";
  }
  row.initial = option.get_default_str();
  row.required = option.get_required();
  row.several = option.get_items_expected_max() > 1;
  return row;
}

}  // namespace

CommandRow table_of(const CLI::App& command) {
  CommandRow row;
  row.name = command.get_name();
  row.description = command.get_description();
  row.footer = command.get_footer();
  for (const CLI::Option* option : command.get_options()) row.options.push_back(row_of(*option));
  return row;
}

std::vector<CommandRow> tables_of_subcommands(const CLI::App& app) {
  std::vector<CommandRow> rows;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    rows.push_back(table_of(*command));
  return rows;
}

}  // namespace folio::cli
