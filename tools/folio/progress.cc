#include "progress.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdio>

namespace folio::cli {
namespace {

constexpr double kTerminalInterval = 0.1;  // seconds
constexpr double kPlainInterval = 5.0;

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

extern "C" void on_interrupt(int) {
  interrupted.store(true, std::memory_order_relaxed);
}

}  // namespace

Progress::Progress(bool quiet) : quiet_(quiet), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  finish();
}

bool Progress::due() const {
  return !quiet_ && since_shown_.elapsed() >= (terminal_ ? kTerminalInterval : kPlainInterval);
}

void Progress::show(const std::string& line) {
  if (quiet_) return;
  since_shown_.lap();
  std::fprintf(stderr, terminal_ ? "\r%s\x1b[K" : "%s\n", line.c_str());
  std::fflush(stderr);
  line_open_ = terminal_;
}

void Progress::finish() {
  if (!line_open_) return;
  std::fputc('\n', stderr);
  line_open_ = false;
}

void Progress::clear() {
  if (line_open_) std::fputs("\r\x1b[K", stderr);
  line_open_ = false;
}

const std::atomic<bool>& interrupted_by_user() {
  struct sigaction action {};
  action.sa_handler = &on_interrupt;
  action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  return interrupted;
}

}  // namespace folio::cli
