#include "replay/attention_stack.hpp"

#include <algorithm>

#include "replay/backend_stack.hpp"
#include "replay/layer_stack.hpp"

namespace folio::replay {

void WorkCounts::add_plan(const StackConfig& config, const AttentionPlan& plan, int32_t layers) {
  const PlanSummary totals = summary(plan);
  const double per_pair = 2.0 * (config.head_dim_qk + config.head_dim_v);
  const int64_t token_bytes = config.token_bytes();
  flops += per_pair * static_cast<double>(totals.qk_pairs) * layers;
  kv_bytes_read += totals.kv_tokens_read * token_bytes * layers;
}

void WorkCounts::add_plan_alone(const StackConfig& config, const AttentionPlan& plan, int32_t layers) {
  const int64_t token_bytes = config.token_bytes();
  kv_bytes_read_alone += summary(plan).kv_tokens_read * token_bytes * layers;
}

void WorkCounts::add_writes(const StackConfig& config, int32_t num_tokens) {
  const int64_t token_bytes = config.token_bytes();
  kv_bytes_written += token_bytes * config.num_kv_heads * num_tokens * config.num_layers;
}

/// An op whose bounds allow only decodes has the decode pass alone: the first bound with a second pass says where it
/// ends.
int32_t Fp8Rows::least_queries(const AttentionOp& op) {
  if (!op.fp8_mma()) return kNoQueries;
  const auto [known, is_new] = known_.try_emplace(op.shared_state(), 1);
  int32_t& queries = known->second;
  const auto within = [&op](int32_t most) {
    PrepareOptions options;
    options.bounds = GraphBounds{.max_requests = 1, .max_tokens = most, .max_q_len = most, .max_kv_len = most};
    options.force_kernel = op.kernel_name();
    options.allow_fp8_mma = true;
    return prepare(op.context(), op.config(), options);
  };
  while (is_new && !within(queries).fp8_mma()) ++queries;
  return queries;
}

int32_t Fp8Rows::least_queries(const AttentionOp& op, const StepBatch& batch, bool shares_keys) {
  const int32_t least = least_queries(op);
  if (!shares_keys || least == kNoQueries) return least;
  int32_t longest = 0;
  for (size_t r = 0; r + 1 < batch.cu_q.size(); ++r) longest = std::max(longest, batch.cu_q[r + 1] - batch.cu_q[r]);
  return longest >= least ? 1 : kNoQueries;
}

size_t AttentionStack::k_page_bytes() const {
  const StackConfig& c = config();
  return static_cast<size_t>(int64_t{c.page_size} * c.num_kv_heads * c.head_dim_qk * size_of(c.kv));
}

size_t AttentionStack::v_page_bytes() const {
  const StackConfig& c = config();
  return static_cast<size_t>(int64_t{c.page_size} * c.num_kv_heads * c.head_dim_v * size_of(c.kv));
}

std::unique_ptr<AttentionStack> make_stack(const Context& context, const StackConfig& config,
                                           distributed::ProcessGroup* processes) {
  if (config.backend != ServingBackend::kNone && config.kv == DType::kInt8) {
    throw Error(ErrorCode::kUnsupported, "--kv-dtype int8 with --backend: the engine backends take no int8 caches");
  }
  if (config.backend != ServingBackend::kNone) return make_backend_stack(context, config, processes);
  if (config.ranks != 1) {
    throw Error(ErrorCode::kUnsupported, "--ranks divides the KV of a backend's layers; give --backend too");
  }
  return std::make_unique<LayerStack>(context, config);
}

}  // namespace folio::replay
