#pragma once

#include <memory>
#include <string_view>

#include "folio/log.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

using v0::LogCallback;
using v0::LogLevel;

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
