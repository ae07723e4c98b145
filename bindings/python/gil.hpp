#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace folio::python {

/// Lets go of the interpreter for a scope. A thread that comes back while the interpreter ends never gets it again: it
/// sleeps until the process is gone, as threads do from Python 3.14 on. Older interpreters end such a thread with
/// pthread_exit, whose unwinding would meet a destructor and abort the process.
class ReleasedGil {
 public:
  ReleasedGil() : thread_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {
      while (true) pause();  // leaving this handler would abort
    }
  }

 private:
  PyThreadState* thread_;
};

}  // namespace folio::python
