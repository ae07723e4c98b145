#include "replay/trace.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "folio/types/error.hpp"
#include "replay/trace_lines.hpp"

namespace folio::replay {
namespace {

constexpr std::string_view kBlanks = " \t\r\v\f";
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

std::string read_all(std::FILE* file, const std::string& path) {
  std::string text;
  char chunk[1 << 16];
  size_t got = 0;
  size_t line_begin = 0;
  while ((got = std::fread(chunk, 1, sizeof chunk, file)) > 0) {
    text.append(chunk, got);
    const size_t end = std::string_view(chunk, got).rfind('\n');
    if (end != std::string_view::npos) line_begin = text.size() - got + end + 1;
    if (text.size() - line_begin > kMaxTraceLineBytes) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: a line of more than {} MiB: this is no trace", path, kMaxTraceLineBytes >> 20));
    }
    if (text.size() > kMaxTraceBytes) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: more than {} MiB: cut the trace", path, kMaxTraceBytes >> 20));
    }
  }
  if (std::ferror(file) != 0) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: cannot be read: {}", path, std::strerror(errno)));
  }
  return text;
}

}  // namespace

LineReader::LineReader(std::string_view text) : rest_(text) {
  if (rest_.starts_with(kByteOrderMark)) rest_.remove_prefix(kByteOrderMark.size());
}

bool LineReader::next(std::string_view& line) {
  while (!rest_.empty()) {
    const size_t end = rest_.find('\n');
    line = trim(rest_.substr(0, end));
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
    ++number_;
    if (!line.empty()) return true;
  }
  return false;
}

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

std::string excerpt(std::string_view text) {
  constexpr size_t kMost = 40;
  std::string shown(text.substr(0, kMost));
  for (char& c : shown) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  if (text.size() > kMost) shown += "...";
  return shown;
}

void fail_at(std::string_view name, int64_t line, const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{}:{}: {}", name, line, message));
}

TraceFormat detect_format(std::string_view text, std::string_view name) {
  LineReader lines(text);
  std::string_view line;
  if (!lines.next(line)) throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: the trace is empty", name));
  if (line.front() == '{') return TraceFormat::kMooncake;
  if (is_azure_header(line)) return TraceFormat::kAzure;
  fail_at(
      name, lines.number(),
      fmt::format("'{}' begins neither a Mooncake trace (one JSON object a line) nor an Azure one (a CSV header with "
                  "TIMESTAMP, ContextTokens and GeneratedTokens)",
                  excerpt(line)));
}

Trace parse_trace(std::string_view text, TraceFormat format, std::string_view name) {
  if (format == TraceFormat::kDetect) format = detect_format(text, name);
  Trace trace = format == TraceFormat::kMooncake ? parse_mooncake(text, name) : parse_azure(text, name);
  if (trace.requests.empty())
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: the trace has no requests", name));
  return trace;
}

Trace read_trace(const std::string& path, TraceFormat format) {
  if (path == "-") return parse_trace(read_all(stdin, "standard input"), format, "standard input");
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (file == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: cannot be opened: {}", path, std::strerror(errno)));
  }
  return parse_trace(read_all(file.get(), path), format, path);
}

}  // namespace folio::replay
