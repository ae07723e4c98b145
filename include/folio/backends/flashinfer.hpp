#pragma once

/// vLLM's FlashInfer attention backend on Folio's kernels. docs/backends.md shows how an engine uses it.
#include "folio/backends/flashinfer/backend.hpp"           // IWYU pragma: export
#include "folio/backends/flashinfer/impl.hpp"              // IWYU pragma: export
#include "folio/backends/flashinfer/metadata_builder.hpp"  // IWYU pragma: export
