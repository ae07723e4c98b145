#include "folio/backends/once_log.hpp"

#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace folio::inline v0::backends {

struct OnceLog::State {
  LogCallback callback;
  std::mutex mutex;
  std::set<std::pair<LogLevel, std::string>> said;
};

OnceLog::OnceLog(LogCallback callback) {
  if (!callback) return;
  state_ = std::make_shared<State>();
  state_->callback = std::move(callback);
}

void OnceLog::operator()(LogLevel level, std::string_view text) const {
  if (!state_) return;
  {
    // Not held during the call: a callback may ask questions that log.
    const std::lock_guard lock(state_->mutex);
    if (!state_->said.emplace(level, text).second) return;
  }
  state_->callback(level, text);
}

}  // namespace folio::inline v0::backends
