#pragma once

#include <string>

namespace folio::replay {

/// ", ETA 1:05", or ", ETA 2:03:05": the time that is left where `share` of the work took `elapsed_seconds`, at the
/// pace so far. Empty while nothing can be said: within the first second, before any work is done, and behind its end.
std::string eta(double share, double elapsed_seconds);

}  // namespace folio::replay
