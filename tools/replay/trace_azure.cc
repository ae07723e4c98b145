#include <fmt/format.h>

#include <array>
#include <charconv>
#include <chrono>
#include <optional>

#include "replay/trace_lines.hpp"

namespace folio::replay {
namespace {

constexpr std::array<std::string_view, 3> kColumns = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"};

/// The fields of a CSV line, blanks and surrounding quotes removed. None of the columns read here can hold a comma.
std::vector<std::string_view> split(std::string_view line) {
  std::vector<std::string_view> fields;
  for (;;) {
    const size_t comma = line.find(',');
    std::string_view field = trim(line.substr(0, comma));
    if (field.size() >= 2 && field.front() == '"' && field.back() == '"') field = field.substr(1, field.size() - 2);
    fields.push_back(field);
    if (comma == std::string_view::npos) return fields;
    line.remove_prefix(comma + 1);
  }
}

/// Where each of kColumns stands in the header; nullopt if one is missing.
std::optional<std::array<size_t, 3>> locate_columns(std::string_view header) {
  const std::vector<std::string_view> names = split(header);
  std::array<size_t, 3> where{};
  for (size_t c = 0; c < kColumns.size(); ++c) {
    size_t at = 0;
    while (at < names.size() && names[at] != kColumns[c]) ++at;
    if (at == names.size()) return std::nullopt;
    where[c] = at;
  }
  return where;
}

/// Takes a number of exactly `digits` digits from the front of `text`.
bool take_digits(std::string_view& text, size_t digits, int& value) {
  if (text.size() < digits) return false;
  value = 0;
  for (size_t i = 0; i < digits; ++i) {
    if (text[i] < '0' || text[i] > '9') return false;
    value = value * 10 + (text[i] - '0');
  }
  text.remove_prefix(digits);
  return true;
}

bool take_char(std::string_view& text, std::string_view any_of) {
  if (text.empty() || any_of.find(text.front()) == std::string_view::npos) return false;
  text.remove_prefix(1);
  return true;
}

/// Takes ".digits" of any length; 0 if there are none.
bool take_fraction(std::string_view& text, double& fraction) {
  fraction = 0.0;
  if (!take_char(text, ".")) return true;
  double unit = 0.1;
  size_t digits = 0;
  for (; digits < text.size() && text[digits] >= '0' && text[digits] <= '9'; ++digits, unit /= 10) {
    fraction += unit * (text[digits] - '0');
  }
  text.remove_prefix(digits);
  return digits > 0;
}

/// Takes "", "Z" or "+hh:mm" (also "-hh:mm") as minutes east of UTC.
bool take_zone(std::string_view& text, int& minutes) {
  minutes = 0;
  if (text.empty() || take_char(text, "Z")) return true;
  const bool west = text.front() == '-';
  int hour = 0;
  int minute = 0;
  if (!take_char(text, "+-") || !take_digits(text, 2, hour) || !take_char(text, ":") || !take_digits(text, 2, minute))
    return false;
  minutes = (west ? -1 : 1) * (hour * 60 + minute);
  return hour < 24 && minute < 60;
}

/// Milliseconds since 1970 of "YYYY-MM-DD hh:mm:ss[.fraction][zone]"; nullopt if it is anything else.
std::optional<double> parse_time(std::string_view text) {
  int year = 0, month = 0, day = 0, hour = 0, minute = 0, second = 0, zone_minutes = 0;
  double fraction = 0.0;
  const bool shaped = take_digits(text, 4, year) && take_char(text, "-") && take_digits(text, 2, month) &&
                      take_char(text, "-") && take_digits(text, 2, day) && take_char(text, " T") &&
                      take_digits(text, 2, hour) && take_char(text, ":") && take_digits(text, 2, minute) &&
                      take_char(text, ":") && take_digits(text, 2, second) && take_fraction(text, fraction) &&
                      take_zone(text, zone_minutes) && text.empty();
  if (!shaped || hour > 23 || minute > 59 || second > 60) return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(year), std::chrono::month(static_cast<unsigned>(month)),
                                         std::chrono::day(static_cast<unsigned>(day))};
  if (!date.ok()) return std::nullopt;
  const int64_t days = std::chrono::sys_days(date).time_since_epoch().count();
  const int64_t seconds = ((days * 24 + hour) * 60 + minute - zone_minutes) * 60 + second;
  return static_cast<double>(seconds) * 1e3 + fraction * 1e3;
}

int32_t token_count(std::string_view text, std::string_view column, int32_t least, std::string_view name,
                    int64_t line) {
  int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > kMaxTraceTokens) {
    fail_at(name, line,
            fmt::format("{} is '{}'; expected a whole number from {} to {}", column, excerpt(text), least,
                        kMaxTraceTokens));
  }
  return value;
}

}  // namespace

bool is_azure_header(std::string_view line) {
  return locate_columns(line).has_value();
}

Trace parse_azure(std::string_view text, std::string_view name) {
  Trace trace;
  trace.format = TraceFormat::kAzure;
  LineReader lines(text);
  std::string_view line;
  if (!lines.next(line)) return trace;
  const std::optional<std::array<size_t, 3>> columns = locate_columns(line);
  if (!columns) {
    fail_at(name, lines.number(),
            fmt::format("'{}' is not a header with TIMESTAMP, ContextTokens and GeneratedTokens", excerpt(line)));
  }
  const size_t width = split(line).size();
  double first_ms = 0.0;
  while (lines.next(line)) {
    const std::vector<std::string_view> fields = split(line);
    if (fields.size() != width) {
      fail_at(name, lines.number(),
              fmt::format("the row has {} fields; the header has {} (is the file cut off?)", fields.size(), width));
    }
    const std::string_view time = fields[(*columns)[0]];
    const std::optional<double> at_ms = parse_time(time);
    if (!at_ms) {
      fail_at(name, lines.number(),
              fmt::format("TIMESTAMP is '{}'; expected YYYY-MM-DD hh:mm:ss.fraction", excerpt(time)));
    }
    if (trace.requests.empty()) first_ms = *at_ms;
    TraceRequest request;
    request.line = lines.number();
    request.arrival_ms = *at_ms - first_ms;
    request.input_length = token_count(fields[(*columns)[1]], kColumns[1], 1, name, lines.number());
    request.output_length = token_count(fields[(*columns)[2]], kColumns[2], 0, name, lines.number());
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

}  // namespace folio::replay
