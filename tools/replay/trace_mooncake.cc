#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "replay/trace_lines.hpp"

namespace folio::replay {
namespace {

using Json = nlohmann::json;

constexpr double kMaxTimestampMs = 1e14;  // three thousand years: sums with it keep millisecond precision

/// One line of the file, for messages.
struct Place {
  std::string_view name;
  int64_t line;
};

/// A value as a message shows it. Arrays and objects are only named: printing them recurses as deep as they nest.
std::string shown(const Json& value) {
  if (value.is_structured()) return value.is_array() ? "an array" : "an object";
  return excerpt(value.dump(-1, ' ', true, Json::error_handler_t::replace));
}

const Json& field(const Json& row, const char* key, const Place& place) {
  const auto found = row.find(key);
  if (found == row.end()) {
    fail_at(
        place.name, place.line,
        fmt::format("field \"{}\" is missing; a row needs timestamp, input_length, output_length and hash_ids", key));
  }
  return *found;
}

int32_t token_count(const Json& row, const char* key, int32_t least, const Place& place) {
  const Json& value = field(row, key, place);
  const bool whole = value.is_number_integer();
  const bool fits =
      whole && (value.is_number_unsigned() ? value.get<uint64_t>() <= static_cast<uint64_t>(kMaxTraceTokens)
                                           : value.get<int64_t>() <= kMaxTraceTokens);
  if (!fits || value.get<int64_t>() < least) {
    fail_at(place.name, place.line,
            fmt::format("{} is {}; expected a whole number from {} to {}", key, shown(value), least, kMaxTraceTokens));
  }
  return value.get<int32_t>();
}

double timestamp(const Json& row, const Place& place) {
  const Json& value = field(row, "timestamp", place);
  const double ms = value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
  if (!(ms >= 0.0 && ms <= kMaxTimestampMs)) {
    fail_at(place.name, place.line,
            fmt::format("timestamp is {}; expected milliseconds from 0 to {:g}", shown(value), kMaxTimestampMs));
  }
  return ms;
}

std::vector<uint64_t> hash_ids(const Json& row, int32_t input_length, const Place& place) {
  const Json& value = field(row, "hash_ids", place);
  if (!value.is_array()) fail_at(place.name, place.line, "hash_ids is not an array of whole numbers");
  const auto expected = static_cast<size_t>((input_length + kTokensPerHash - 1) / kTokensPerHash);
  if (value.size() != expected) {
    fail_at(place.name, place.line,
            fmt::format("hash_ids has {} entries; input_length {} needs {}, one per {} tokens", value.size(),
                        input_length, expected, kTokensPerHash));
  }
  std::vector<uint64_t> ids;
  ids.reserve(expected);
  for (const Json& id : value) {
    if (!id.is_number_integer()) {
      fail_at(place.name, place.line, fmt::format("hash_ids[{}] is not a whole number of 64 bits", ids.size()));
    }
    ids.push_back(id.is_number_unsigned() ? id.get<uint64_t>() : static_cast<uint64_t>(id.get<int64_t>()));
  }
  return ids;
}

Json parse_row(std::string_view line, const Place& place) {
  Json row;
  try {
    row = Json::parse(line);
  } catch (const Json::exception& error) {
    const std::string_view what = error.what();
    const size_t reason = what.find("] ");  // behind "[json.exception.parse_error.101] "
    fail_at(place.name, place.line,
            fmt::format("'{}' is not valid JSON; expected one object a line (is the file cut off?): {}", excerpt(line),
                        reason == std::string_view::npos ? what : what.substr(reason + 2)));
  }
  if (!row.is_object()) {
    fail_at(place.name, place.line,
            fmt::format("'{}' is not a JSON object; expected one object a line", excerpt(line)));
  }
  return row;
}

}  // namespace

Trace parse_mooncake(std::string_view text, std::string_view name) {
  Trace trace;
  trace.format = TraceFormat::kMooncake;
  LineReader lines(text);
  std::string_view line;
  while (lines.next(line)) {
    const Place place{name, lines.number()};
    const Json row = parse_row(line, place);
    TraceRequest request;
    request.line = lines.number();
    request.arrival_ms = timestamp(row, place);
    request.input_length = token_count(row, "input_length", 1, place);
    request.output_length = token_count(row, "output_length", 0, place);
    request.hash_ids = hash_ids(row, request.input_length, place);
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

}  // namespace folio::replay
