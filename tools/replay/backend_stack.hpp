#pragma once

#include <memory>

#include "folio/distributed.hpp"
#include "folio/folio.hpp"
#include "replay/attention_stack.hpp"

namespace folio::replay {

/// A stack whose layers one of the engine backends serves: its builder orders and plans every step, its implementation
/// writes and attends every layer, over one cache tensor a layer, as an engine would use it. With config.ranks > 1
/// ranks divide the KV: threads of this process, or, given `processes` (borrowed), this process and its peers, which
/// all replay the same steps. Throws kInvalidArgument for ServingBackend::kNone and kTokenPool and for ranks that do
/// not divide the heads, kUnsupported for what backends do not take (packed pages, a head_dim_v of its own).
std::unique_ptr<AttentionStack> make_backend_stack(const Context& context, const StackConfig& config,
                                                   distributed::ProcessGroup* processes = nullptr);

}  // namespace folio::replay
