#pragma once

#include <memory>

#include "replay/attention_stack.hpp"
#include "replay/token_keeper.hpp"

namespace folio::replay {

/// A stack whose layers the token-pool backend serves from `keeper`'s slots (borrowed), over a KvPool of as many pages.
/// Throws kUnsupported for what it does not take: ranks, cascades, steps without attention, fp8 queries.
std::unique_ptr<AttentionStack> make_token_pool_stack(const Context& context, const StackConfig& config,
                                                      const TokenKeeper& keeper);

}  // namespace folio::replay
