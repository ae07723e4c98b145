#include "core/error.hpp"

#include <charconv>

namespace folio::inline v0::core {

namespace {

template <typename Number>
void append_number(std::string& message, Number value) {
  // 24 characters hold the longest shortest-form double ("-2.2250738585072014e-308") and every 64-bit integer.
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  message.append(text, end);
}

}  // namespace

void append(std::string& message, std::string_view text) {
  message.append(text);
}
void append(std::string& message, int64_t value) {
  append_number(message, value);
}
void append(std::string& message, uint64_t value) {
  append_number(message, value);
}
void append(std::string& message, double value) {
  append_number(message, value);
}
void append(std::string& message, float value) {
  append_number(message, value);
}

void throw_error(ErrorCode code, const std::string& text) {
  throw Error(code, text);
}

}  // namespace folio::inline v0::core
