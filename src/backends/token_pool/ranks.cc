#include "backends/token_pool/ranks.hpp"

#include "backends/token_pool/device/kv_range_rule.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends::token_pool {

ParallelConfig parallel_of(const TokenPoolConfig& config) {
  ParallelConfig parallel;
  if (config.dcp_group != nullptr) {
    parallel.decode_context_parallel_size = config.dcp_group->size();
    parallel.decode_context_parallel_rank = config.dcp_group->rank();
  }
  parallel.dcp_group = config.dcp_group;
  parallel.cp_kv_cache_interleave_size = config.cp_kv_cache_interleave_size;
  parallel.dcp_comm_backend = config.dcp_comm_backend;
  parallel.dcp_replicated_queries = config.dcp_replicated_queries;
  parallel.dcp_all_heads_out = config.dcp_all_heads_out;
  parallel.dcp_transport = config.dcp_transport;
  parallel.dcp_partial_dtype = config.dcp_partial_dtype;
  return parallel;
}

KvShard shard_of(const TokenPoolConfig& config) {
  if (config.dcp_group == nullptr || config.dcp_group->size() == 1) return {};
  return {config.dcp_group->size(), config.dcp_group->rank(), config.cp_kv_cache_interleave_size};
}

int32_t query_heads(const TokenPoolConfig& config) {
  return config.dcp_replicated_queries ? core::checked_mul(config.num_heads, shard_of(config).world) : config.num_heads;
}

int32_t out_heads(const TokenPoolConfig& config) {
  return config.dcp_all_heads_out ? core::checked_mul(config.num_heads, shard_of(config).world) : config.num_heads;
}

bool ends_with_page(const TokenPoolConfig& config, int32_t tokens) {
  KvShard shard = shard_of(config);
  for (shard.rank = 0; shard.rank < shard.world; ++shard.rank) {
    if (own_tokens(shard, tokens) % config.page_size != 0) return false;
  }
  return true;
}

void check_graphs(const Context& context, const TokenPoolConfig& config) {
  if (!is_divided(config) || context.device().type == DeviceType::kCpu || config.dcp_group->enqueues()) return;
  core::fail(ErrorCode::kUnsupported, "dcp_group's operations wait on the host; graphs need a group whose ",
             "ProcessGroup::enqueues is true");
}

}  // namespace folio::inline v0::backends::token_pool
