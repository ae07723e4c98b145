#include "attention/log.hpp"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace folio::inline v0 {
namespace {

constexpr int32_t kNobody = static_cast<int32_t>(LogLevel::kError) + 1;

struct Listener {
  std::atomic<int32_t> least{kNobody};
  std::mutex mutex;  ///< of `callback`; not held during calls, since a callback may make calls that log
  std::shared_ptr<const LogCallback> callback;
};

/// Never destroyed: threads of an engine may log while the process ends.
Listener& listener() {
  static Listener* const only = new Listener;
  return *only;
}

}  // namespace

bool attention::is_logged(LogLevel level) noexcept {
  return static_cast<int32_t>(level) >= listener().least.load(std::memory_order_relaxed);
}

void attention::write_log(LogLevel level, const std::string& line) {
  std::shared_ptr<const LogCallback> callback;
  {
    const std::lock_guard lock(listener().mutex);
    callback = listener().callback;
  }
  if (callback != nullptr) (*callback)(level, line);
}

void set_log_callback(LogCallback callback, LogLevel least) {
  core::require(least >= LogLevel::kDebug && least <= LogLevel::kError, "least is ", static_cast<int32_t>(least),
                "; levels are from 0 (kDebug) to 3 (kError)");
  const bool silent = !callback;
  auto kept = silent ? nullptr : std::make_shared<const LogCallback>(std::move(callback));
  const std::lock_guard lock(listener().mutex);
  listener().callback.swap(kept);
  listener().least.store(silent ? kNobody : static_cast<int32_t>(least), std::memory_order_relaxed);
}

}  // namespace folio::inline v0
