#pragma once

/// The whole public C++ API of the core. Pools and the prefix cache are in folio/pools.hpp. The library
/// folio_backends has its headers under folio/backends/, folio_testing has folio/verify.hpp and folio/reference.hpp.
#include "folio/attention.hpp"            // IWYU pragma: export
#include "folio/cascade.hpp"              // IWYU pragma: export
#include "folio/context.hpp"              // IWYU pragma: export
#include "folio/kv_cache.hpp"             // IWYU pragma: export
#include "folio/merge.hpp"                // IWYU pragma: export
#include "folio/page_table.hpp"           // IWYU pragma: export
#include "folio/paged_attention.hpp"      // IWYU pragma: export
#include "folio/quantize.hpp"             // IWYU pragma: export
#include "folio/sealed_plan.hpp"          // IWYU pragma: export
#include "folio/shared_prefix.hpp"        // IWYU pragma: export
#include "folio/table_ops.hpp"            // IWYU pragma: export
#include "folio/types/float_convert.hpp"  // IWYU pragma: export
#include "folio/version.hpp"              // IWYU pragma: export
