#pragma once

#include <atomic>
#include <string>

#include "replay/stopwatch.hpp"

namespace folio::cli {

/// Progress on standard error: one line that is rewritten on a terminal, plain lines at intervals elsewhere.
class Progress {
 public:
  explicit Progress(bool quiet);
  ~Progress();

  /// True if it is time to show something: call `show` then, so that nothing is formatted in vain.
  bool due() const;
  /// The same for what takes long each time: at once on a terminal.
  bool due_or_watched() const { return !quiet_ && (terminal_ || due()); }
  void show(const std::string& line);

  /// Leaves a clean line for what comes next.
  void finish();

  /// The same on a terminal, where the line itself goes away.
  void clear();

  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  bool quiet_;
  bool terminal_;
  bool line_open_ = false;
  replay::Stopwatch since_shown_;
};

/// Routes SIGINT into a flag that long-running commands look at; a second SIGINT ends the process as usual.
const std::atomic<bool>& interrupted_by_user();

}  // namespace folio::cli
