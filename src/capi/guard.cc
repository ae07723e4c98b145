#include "capi/guard.hpp"

#include <string>

namespace folio::inline v0::capi {

namespace {

struct LastError {
  std::string text;
  bool lost = false;  ///< there was no memory to keep it
};

LastError& slot() noexcept {
  static thread_local LastError error;
  return error;
}

}  // namespace

void set_last_error(const char* message) noexcept {
  LastError& error = slot();
  try {
    error.text = message;
    error.lost = false;
  } catch (const std::exception&) {
    error.lost = true;
  }
}

const char* last_error() noexcept {
  const LastError& error = slot();
  return error.lost ? "the message of the last error found no memory" : error.text.c_str();
}

}  // namespace folio::inline v0::capi
