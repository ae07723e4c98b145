#pragma once

/// Pools, allocators and the prefix cache: what an engine keeps beside attention (docs/kvcache.md).
#include "folio/kvcache/kv_pool.hpp"                 // IWYU pragma: export
#include "folio/kvcache/prefix_cache.hpp"            // IWYU pragma: export
#include "folio/kvcache/req_to_token_pool.hpp"       // IWYU pragma: export
#include "folio/kvcache/slot_changes.hpp"            // IWYU pragma: export
#include "folio/kvcache/token_allocator.hpp"         // IWYU pragma: export
#include "folio/kvcache/window_token_allocator.hpp"  // IWYU pragma: export
