#pragma once

#include "folio/c/context.h"
#include "folio/c/pools.h"
#include "folio/context.hpp"
#include "folio/kvcache/kv_pool.hpp"

/// The C handles that both libraries look into. Each keeps what it needs alive through the shared states behind the C++
/// handles.

struct folio_context {
  folio::Context context;
};

struct folio_kv_pool {
  folio::KvPool pool;
};
