#pragma once

#include <cstdint>

#include "folio/backends/engine_config.hpp"
#include "folio/backends/token_pool/backend.hpp"
#include "folio/types/attention.hpp"

/// The ranks that a backend's keys are divided over (TokenPoolConfig::dcp_group).
namespace folio::inline v0::backends::token_pool {

/// What the configuration says of them, as the other backends are told it.
ParallelConfig parallel_of(const TokenPoolConfig& config);

/// This rank's share of every sequence; all of it where keys are not divided.
KvShard shard_of(const TokenPoolConfig& config);
inline bool is_divided(const TokenPoolConfig& config) {
  return shard_of(config).world > 1;
}

/// Query heads that layers are given, and heads that they write.
int32_t query_heads(const TokenPoolConfig& config);
int32_t out_heads(const TokenPoolConfig& config);

/// Whether a page ends with a request's first `tokens`, on every rank: ranks read by the same pages.
bool ends_with_page(const TokenPoolConfig& config, int32_t tokens);

/// Throws kUnsupported where captured steps over these ranks would wait on the host.
void check_graphs(const Context& context, const TokenPoolConfig& config);

}  // namespace folio::inline v0::backends::token_pool
