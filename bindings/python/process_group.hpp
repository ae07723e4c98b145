#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "array.hpp"
#include "folio/distributed/process_group.hpp"
#include "folio/types/error.hpp"

namespace folio::python {

using distributed::ProcessGroup;

/// A rank's handle. One that run_ranks lent is empty once its body has ended.
struct Group {
  std::unique_ptr<ProcessGroup> owned;
  ProcessGroup* group = nullptr;  ///< set and read with the GIL
  int32_t rank = 0;
  int32_t size = 1;
  Device device;
  std::mutex mutex;  ///< held by operations

  explicit Group(ProcessGroup& lent) : group(&lent), rank(lent.rank()), size(lent.size()), device(lent.device()) {}
  explicit Group(std::unique_ptr<ProcessGroup> made) : Group(*made) { owned = std::move(made); }
};

/// A group while one thread uses it. To be made with the GIL.
class GroupUse {
 public:
  explicit GroupUse(Group& group) : lock_(group.mutex, std::try_to_lock) {
    if (!lock_.owns_lock()) refuse("rank " + std::to_string(group.rank) + "'s group is in use by another thread");
    if (group.group == nullptr) {
      throw Error(ErrorCode::kUnavailable,
                  "rank " + std::to_string(group.rank) + " has left the group: its body has ended");
    }
    group_ = group.group;
  }
  ProcessGroup& operator*() const { return *group_; }
  ProcessGroup* operator->() const { return group_; }

 private:
  std::unique_lock<std::mutex> lock_;
  ProcessGroup* group_ = nullptr;
};

}  // namespace folio::python
