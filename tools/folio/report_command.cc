#include <fmt/format.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "commands.hpp"
#include "folio/types/error.hpp"
#include "folio/version.hpp"
#include "report_page.hpp"

namespace folio::cli {
namespace {

struct ReportFlags {
  std::vector<std::string> files;
  std::string output;
  std::string title = "Folio report";
};

/// "results/replay.json" as the page calls it: "replay"; by its whole path where two files would have one name.
std::string name_of(const std::string& path, const std::set<std::string>& taken) {
  const size_t slash = path.find_last_of('/');
  std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  const size_t dot = name.rfind(".json");
  if (dot != std::string::npos && dot > 0) name.resize(dot);
  return taken.contains(name) ? path : name;
}

nlohmann::ordered_json read_json(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: cannot be opened", path));
  constexpr size_t kMostBytes = size_t{64} << 20;  // a hundred times what a replay writes
  std::string text;
  char part[1 << 16];
  while (file.read(part, sizeof part) || file.gcount() > 0) {
    text.append(part, static_cast<size_t>(file.gcount()));
    if (text.size() > kMostBytes) {
      throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: more than 64 MiB, which no result has", path));
    }
  }
  try {
    return nlohmann::ordered_json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: no JSON: {}", path, error.what()));
  }
}

int make_report(const ReportFlags& flags) {
  std::vector<ReportFile> files;
  std::set<std::string> taken;
  for (const std::string& path : flags.files) {
    if (path == flags.output) {
      throw Error(ErrorCode::kInvalidArgument, fmt::format("{} is read and written: give --output another name", path));
    }
    ReportFile file{name_of(path, taken), read_json(path)};
    if (!taken.insert(file.name).second) {
      throw Error(ErrorCode::kInvalidArgument, fmt::format("{} is given twice", path));
    }
    file.kind = kind_of(file.content, path);
    files.push_back(std::move(file));
  }
  const std::string page = report_page(flags.title, files);
  replay::OutputFile output(flags.output);
  output.write(page);
  output.close();
  if (flags.output != "-")
    fmt::print("{}: {} files, {:.1f} MB\n", flags.output, files.size(), static_cast<double>(page.size()) / 1e6);
  return kSuccess;
}

}  // namespace

Command add_report_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("report", "One HTML page of what replays and benchmarks wrote as JSON");
  auto flags = std::make_shared<ReportFlags>();
  command->add_option("files", flags->files, "JSON of folio replay --json, folio bench --json or bench/peers --json")
      ->required()
      ->type_name("FILE");
  command->add_option("-o,--output", flags->output, "the page; '-' = standard output")->required()->type_name("FILE");
  command->add_option("--title", flags->title, "the page's title")->capture_default_str();
  command->footer(
      "The page holds its data and what draws it, and loads nothing: it can be kept, sent and opened anywhere.\n"
      "Example: folio replay examples/traces/mooncake_excerpt.jsonl --clock measured --json replay.json\n"
      "         folio report replay.json -o report.html");
  return {command, [flags] { return make_report(*flags); }};
}

}  // namespace folio::cli
