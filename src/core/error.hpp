#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

#include "folio/types/dtype.hpp"
#include "folio/types/error.hpp"

/// Building messages and throwing. The templates only dispatch; formatting and throwing are out of line, so that a
/// check costs its caller a compare and a cold call.
namespace folio::inline v0::core {

void append(std::string& message, std::string_view text);
void append(std::string& message, int64_t value);
void append(std::string& message, uint64_t value);
void append(std::string& message, double value);  ///< shortest text that reads back as the same value
void append(std::string& message, float value);
inline void append(std::string& message, const char* text) {
  append(message, std::string_view(text));
}
inline void append(std::string& message, const std::string& text) {
  append(message, std::string_view(text));
}
inline void append(std::string& message, char character) {
  append(message, std::string_view(&character, 1));
}
inline void append(std::string& message, bool value) {
  append(message, std::string_view(value ? "true" : "false"));
}
inline void append(std::string& message, DType dtype) {
  append(message, to_string(dtype));
}
template <std::signed_integral Int>
void append(std::string& message, Int value) {
  append(message, static_cast<int64_t>(value));
}
template <std::unsigned_integral Int>
void append(std::string& message, Int value) {
  append(message, static_cast<uint64_t>(value));
}

/// The parts' texts, one after the other: strings, characters, integers, floats, booleans and dtypes.
template <typename... Parts>
std::string message(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

/// Throws Error(code, text).
[[noreturn]] void throw_error(ErrorCode code, const std::string& text);

/// Throws Error(code, the parts' texts): say what was given and what is offered.
template <typename... Parts>
[[noreturn]] void fail(ErrorCode code, const Parts&... parts) {
  throw_error(code, message(parts...));
}

/// Throws Error(kInvalidArgument, the parts' texts) unless `condition` holds.
template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    fail(ErrorCode::kInvalidArgument, parts...);
  }
}

}  // namespace folio::inline v0::core
