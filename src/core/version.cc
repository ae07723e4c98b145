#include "folio/version.hpp"

namespace folio::inline v0 {

const char* version() noexcept {
  return FOLIO_VERSION_STRING;
}

}  // namespace folio::inline v0
