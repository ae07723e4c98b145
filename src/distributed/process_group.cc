#include "folio/distributed/process_group.hpp"

namespace folio::inline v0::distributed {

ProcessGroup::~ProcessGroup() = default;

}  // namespace folio::inline v0::distributed
