#include "report_page.hpp"

#include <fmt/format.h>

#include <array>
#include <initializer_list>

#include "folio/types/error.hpp"
#include "folio/version.hpp"
#include "report_assets.hpp"

namespace folio::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Reads a document's fields and refuses what the page's script would stumble over, by the path of the field.
class Reader {
 public:
  Reader(const Json& json, std::string file, std::string at = {})
      : json_(json), file_(std::move(file)), at_(std::move(at)) {}

  Reader field(const std::string& name) const {
    if (!json_.is_object() || !json_.contains(name)) fail(name, "is missing");
    return {json_[name], file_, at_.empty() ? name : at_ + "." + name};
  }
  Reader item(size_t index) const { return {json_[index], file_, fmt::format("{}[{}]", at_, index)}; }
  bool has(const std::string& name) const { return json_.is_object() && json_.contains(name); }
  const Json& json() const { return json_; }

  void numbers(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (!field(name).json_.is_number()) fail(name, "is no number");
    }
  }
  void texts(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (!field(name).json_.is_string()) fail(name, "is no text");
    }
  }
  /// An array; of numbers, and of so many, where that is asked for.
  Reader array(const std::string& name) const {
    Reader array = field(name);
    if (!array.json_.is_array()) fail(name, "is no array");
    return array;
  }
  void columns(std::initializer_list<const char*> names) const {
    size_t rows = 0;
    for (const char* name : names) {
      const Reader column = array(name);
      if (name == *names.begin()) rows = column.json_.size();
      if (column.json_.size() != rows)
        fail(name, fmt::format("has {} values, {} has {}", column.json_.size(), *names.begin(), rows));
      column.all_numbers();
    }
  }
  void all_numbers() const {
    for (const Json& value : json_) {
      if (!value.is_number())
        throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {} holds what is no number", file_, at_));
    }
  }
  [[noreturn]] void fail(const std::string& name, const std::string& why) const {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {}{}{} {}", file_, at_, at_.empty() || name.empty() ? "" : ".", name, why));
  }

 private:
  const Json& json_;
  std::string file_;
  std::string at_;
};

void check_replay(const Reader& run) {
  if (!run.has("latency") || !run.has("series")) {
    run.fail("latency", "is missing: the file is of an older folio replay, or of --count-prefix-hits; replay again");
  }
  run.field("attention").texts({"backend", "kernel"});
  run.field("requests").numbers({"total", "finished", "preemptions"});
  run.field("tokens").numbers({"computed", "prefix_hit_rate"});
  run.field("pages").numbers({"total", "evictions"});
  run.field("steps").numbers({"count"});
  run.field("checks").numbers({"rows", "failures"});
  const Reader latency = run.field("latency");
  latency.texts({"clock"});
  const std::string clock = latency.json()["clock"];
  if (clock != "fixed" && clock != "measured" && clock != "wall")
    latency.fail("clock", fmt::format("is '{}'; fixed, measured and wall are known", clock));
  if (clock == "fixed") latency.numbers({"step_s"});
  for (const char* name : {"ttft_s", "tbt_s", "tpot_s", "e2e_s"}) {
    const Reader one = latency.field(name);
    one.numbers({"count", "p50", "p90", "p99"});
    one.array("quantiles").all_numbers();
  }
  const Reader series = run.field("series");
  series.numbers({"steps_per_point"});
  series.columns({"step", "steps", "start_s", "end_s", "decoding", "prefilling", "waiting", "query_tokens",
                  "prefix_hits", "pages_held", "pages_cached", "schedule_s", "write_s", "plan_s", "run_s"});
}

void check_bench(const Reader& bench) {
  bench.texts({"device"});
  bench.numbers({"threads", "rounds"});
  const Reader cases = bench.array("cases");
  for (size_t i = 0; i < cases.json().size(); ++i) {
    const Reader one = cases.item(i);
    one.texts({"kind", "kernel"});
    one.numbers({"batch", "q_len", "kv_len", "kv_bytes", "flop"});
    for (const char* name :
         {"run_s", "yardstick_read_bytes_per_s", "yardstick_multiply_flop_per_s", "yardstick_matrix_flop_per_s"}) {
      one.field(name).numbers({"median"});
    }
  }
}

void check_ranks(const Reader& bench) {
  bench.texts({"device"});
  bench.numbers({"rounds"});
  const Reader simulated = bench.field("simulated");
  if (!simulated.json().is_boolean()) bench.fail("simulated", "is neither true nor false");
  const Reader cases = bench.array("cases");
  for (size_t i = 0; i < cases.json().size(); ++i) {
    const Reader one = cases.item(i);
    one.texts({"kernel"});
    one.numbers({"ranks", "batch", "q_len", "kv_len"});
    for (const char* name : {"one_rank_s", "layer_s", "efficiency"}) one.field(name).numbers({"median", "min", "max"});
    if (!simulated.json().get<bool>()) continue;
    one.field("rank_s").numbers({"median"});
    one.numbers({"link_s", "bytes_sent"});
  }
}

void check_peers(const Reader& comparison) {
  comparison.texts({"device"});
  comparison.numbers({"threads"});
  const Reader results = comparison.array("results");
  for (size_t i = 0; i < results.json().size(); ++i) {
    const Reader row = results.item(i);
    row.texts({"row"});
    const Reader times = row.field("us");
    if (!times.json().is_object()) row.fail("us", "is no object of times by program");
    for (const auto& [program, values] : times.json().items()) {
      times.array(program).all_numbers();
      if (!values.empty()) row.field("said").field(program).numbers({"bytes", "flops"});
    }
  }
}

/// JSON within a script element: no markup begins in it.
std::string as_script(const Json& json) {
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return safe;
}

std::string as_text(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '<': safe += "&lt;"; break;
      case '&': safe += "&amp;"; break;
      default: safe += c;
    }
  }
  return safe;
}

}  // namespace

std::string_view kind_of(const nlohmann::ordered_json& content, const std::string& path) {
  const Reader reader(content, path);
  if (reader.has("attention") && reader.has("steps")) {
    check_replay(reader);
    return "replay";
  }
  if (reader.has("cases") && reader.has("simulated")) {
    check_ranks(reader);
    return "ranks";
  }
  if (reader.has("cases")) {
    check_bench(reader);
    return "bench";
  }
  if (reader.has("results")) {
    check_peers(reader);
    return "peers";
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: neither of folio replay --json nor of folio bench --json nor of bench/peers --json", path));
}

std::string report_page(const std::string& title, const std::vector<ReportFile>& files) {
  const ReportAssets assets = report_assets();
  if (assets.vega.empty()) {
    throw Error(ErrorCode::kUnavailable,
                "this build of folio has no Vega-Lite, which draws the page: install the Python package "
                "vl-convert-python (scripts/install_deps.sh report) and configure again");
  }
  Json data = {{"title", title}, {"version", version()}, {"files", Json::array()}};
  for (const ReportFile& file : files) {
    data["files"].push_back({{"name", file.name}, {"kind", file.kind}, {"content", file.content}});
  }
  struct Place {
    std::string_view mark;
    std::string text;
  };
  const std::array<Place, 3> places = {Place{"{{LICENCES}}", as_text(assets.licences)},
                                       Place{"{{DATA}}", as_script(data)}, Place{"{{VEGA}}", std::string(assets.vega)}};
  std::string page;
  std::string_view rest = assets.page;
  for (const Place& place : places) {  // in the template's order, so that nothing inserted is looked at
    const size_t at = rest.find(place.mark);
    if (at == std::string_view::npos) throw Error(ErrorCode::kInternal, fmt::format("the page has no {}", place.mark));
    page.append(rest.substr(0, at)).append(place.text);
    rest.remove_prefix(at + place.mark.size());
  }
  return page.append(rest);
}

}  // namespace folio::cli
