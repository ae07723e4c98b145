#include "replay/attention_stack.hpp"

#include "replay/backend_stack.hpp"
#include "replay/layer_stack.hpp"

namespace folio::replay {

void WorkCounts::add_plan(const StackConfig& config, const AttentionPlan& plan, int32_t layers) {
  const PlanSummary totals = summary(plan);
  const double per_pair = 2.0 * (config.head_dim_qk + config.head_dim_v);
  const int64_t token_bytes = int64_t{config.head_dim_qk + config.head_dim_v} * size_of(config.kv);
  flops += per_pair * static_cast<double>(totals.qk_pairs) * layers;
  kv_bytes_read += totals.kv_tokens_read * token_bytes * layers;
}

void WorkCounts::add_plan_alone(const StackConfig& config, const AttentionPlan& plan, int32_t layers) {
  const int64_t token_bytes = int64_t{config.head_dim_qk + config.head_dim_v} * size_of(config.kv);
  kv_bytes_read_alone += summary(plan).kv_tokens_read * token_bytes * layers;
}

void WorkCounts::add_writes(const StackConfig& config, int32_t num_tokens) {
  const int64_t token_bytes = int64_t{config.head_dim_qk + config.head_dim_v} * size_of(config.kv);
  kv_bytes_written += token_bytes * config.num_kv_heads * num_tokens * config.num_layers;
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
  if (config.backend != ServingBackend::kNone) return make_backend_stack(context, config, processes);
  if (config.dcp != 1) {
    throw Error(ErrorCode::kUnsupported, "--dcp divides the KV of a backend's layers; give --backend too");
  }
  return std::make_unique<LayerStack>(context, config);
}

}  // namespace folio::replay
