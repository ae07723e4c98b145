#pragma once

/// vLLM's FlashAttention backend on Folio's kernels. docs/flash_attn.md shows how an engine uses it.
#include "folio/backends/flash_attn/backend.hpp"            // IWYU pragma: export
#include "folio/backends/flash_attn/cascade_attention.hpp"  // IWYU pragma: export
#include "folio/backends/flash_attn/impl.hpp"               // IWYU pragma: export
#include "folio/backends/flash_attn/metadata_builder.hpp"   // IWYU pragma: export
#include "folio/backends/flash_attn/version.hpp"            // IWYU pragma: export
