#pragma once

/// What every engine adapter shares: the plain structs that an engine fills, and the functions that order and divide a
/// batch.
#include "folio/backends/attention_layer.hpp"      // IWYU pragma: export
#include "folio/backends/attention_metadata.hpp"   // IWYU pragma: export
#include "folio/backends/batch_order.hpp"          // IWYU pragma: export
#include "folio/backends/capability.hpp"           // IWYU pragma: export
#include "folio/backends/cascade.hpp"              // IWYU pragma: export
#include "folio/backends/cascade_heuristic.hpp"    // IWYU pragma: export
#include "folio/backends/dcp_plans.hpp"            // IWYU pragma: export
#include "folio/backends/engine_config.hpp"        // IWYU pragma: export
#include "folio/backends/graph_padding.hpp"        // IWYU pragma: export
#include "folio/backends/kv_scales.hpp"            // IWYU pragma: export
#include "folio/backends/merge_attn_states.hpp"    // IWYU pragma: export
#include "folio/backends/once_log.hpp"             // IWYU pragma: export
#include "folio/backends/output_quantization.hpp"  // IWYU pragma: export
#include "folio/backends/selection.hpp"            // IWYU pragma: export
#include "folio/backends/virtual_batches.hpp"      // IWYU pragma: export
#include "folio/backends/window_plans.hpp"         // IWYU pragma: export
