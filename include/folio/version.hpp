#pragma once

#include "folio/types/export.hpp"

#define FOLIO_VERSION_MAJOR 0
#define FOLIO_VERSION_MINOR 1
#define FOLIO_VERSION_PATCH 0
#define FOLIO_VERSION_STRING "0.1.0"

namespace folio::inline v0 {

/// The version of the library that is linked, which may differ from the headers' FOLIO_VERSION_STRING. Static storage.
FOLIO_API const char* version() noexcept;

}  // namespace folio::inline v0
