#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "replay/trace.hpp"

namespace folio::replay {

/// Walks a text line by line: without line ends (LF or CRLF), a leading byte order mark or blank lines.
class LineReader {
 public:
  explicit LineReader(std::string_view text);

  /// The next line that is not blank; false at the end.
  bool next(std::string_view& line);

  /// The number of the line that `next` gave last, from 1.
  int64_t number() const { return number_; }

 private:
  std::string_view rest_;
  int64_t number_ = 0;
};

/// `text` without blanks at its ends.
std::string_view trim(std::string_view text);

/// At most 40 characters of `text` for a message, with unprintable bytes replaced.
std::string excerpt(std::string_view text);

/// Throws folio::Error(kInvalidArgument, "name:line: message").
[[noreturn]] void fail_at(std::string_view name, int64_t line, const std::string& message);

/// The two readers behind parse_trace.
Trace parse_mooncake(std::string_view text, std::string_view name);
Trace parse_azure(std::string_view text, std::string_view name);

/// True if `line` is an Azure header: it names all three columns.
bool is_azure_header(std::string_view line);

}  // namespace folio::replay
