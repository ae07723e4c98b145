#pragma once

/// The token-pool backend: serving from slots, as pymllm and SGLang do. See docs/token_pool.md.
#include "folio/backends/token_pool/backend.hpp"
#include "folio/backends/token_pool/device_faults.hpp"
#include "folio/backends/token_pool/device_req_to_token_pool.hpp"
#include "folio/backends/token_pool/draft_kv_indices.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"
#include "folio/backends/token_pool/graph_inputs.hpp"
#include "folio/backends/token_pool/kv_indices.hpp"
