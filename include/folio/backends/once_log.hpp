#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

enum class LogLevel : int32_t { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

/// Takes one line, without an end of line. May be called from any thread that asks the questions which are logged.
using LogCallback = std::function<void(LogLevel, std::string_view)>;

/// Hands lines to the engine's logger, each text at a level once in this object's life. Copies share what they have
/// said. Without a callback nothing is kept. Safe for use by several threads, except that the callback may then run
/// on several at once.
class FOLIO_API OnceLog {
 public:
  OnceLog() = default;
  explicit OnceLog(LogCallback callback);

  void operator()(LogLevel level, std::string_view text) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace folio::inline v0::backends
