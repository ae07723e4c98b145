#pragma once

#include "folio/distributed.hpp"

namespace folio::cli {

/// The processes that mpirun started, where it started this one: they are one group until the session ends. Throws
/// folio::Error(kUnavailable) where this program's MPI module is missing or cannot be loaded. One session a process.
class MpiSession {
 public:
  MpiSession();
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  /// Null outside mpirun, and where it started one process only.
  distributed::ProcessGroup* group() const { return group_; }
  /// Whether this process is the one that prints.
  bool prints() const { return group_ == nullptr || group_->rank() == 0; }

 private:
  distributed::ProcessGroup* group_ = nullptr;  ///< of the module, which destroys it
};

}  // namespace folio::cli
