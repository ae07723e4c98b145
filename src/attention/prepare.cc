#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "attention/config.hpp"
#include "attention/context.hpp"
#include "attention/op_state.hpp"
#include "attention/workspace.hpp"
#include "core/error.hpp"
#include "folio/attention.hpp"

namespace folio::inline v0 {
namespace {

constexpr int32_t kMaxWorkers = 1 << 16;

/// The one environment variable Folio reads: a debugging aid, below what the code asks for.
std::string forced_kernel(const Context& context, const PrepareOptions& options) {
  if (!options.force_kernel.empty()) return options.force_kernel;
  if (!context.state().force_kernel.empty()) return context.state().force_kernel;
  const char* forced = std::getenv("FOLIO_FORCE_KERNEL");
  return forced == nullptr ? std::string() : std::string(forced);
}

KernelAnswer ask(const kernels::AttentionKernel& kernel, const AttentionConfig& config) {
  KernelAnswer answer;
  answer.name = kernel.name;
  const std::string missing = kernel.unavailable(platform::cpu_features());
  answer.available = missing.empty();
  answer.refusal = answer.available ? kernel.refusal(config) : missing;
  return answer;
}

const kernels::AttentionKernel& choose(const AttentionConfig& config, const std::string& forced) {
  std::string reasons;
  for (const kernels::AttentionKernel* kernel : kernels::cpu_attention_kernels()) {
    if (!forced.empty() && forced != kernel->name) continue;
    const KernelAnswer answer = ask(*kernel, config);
    if (answer.refusal.empty()) return *kernel;
    reasons += (reasons.empty() ? "" : "; ") + answer.name + ": " + answer.refusal;
  }
  if (reasons.empty()) {
    std::string names;
    for (const kernels::AttentionKernel* kernel : kernels::cpu_attention_kernels()) {
      names += (names.empty() ? "" : ", ") + std::string(kernel->name);
    }
    core::fail(ErrorCode::kInvalidArgument, "force_kernel is \"", forced, "\"; kernels here are: ", names);
  }
  core::fail(ErrorCode::kUnsupported, "no kernel takes this configuration: ", reasons);
}

planner::PlannerConfig planner_config(const AttentionConfig& config, const kernels::AttentionKernel& kernel,
                                      const PrepareOptions& options, int32_t num_workers) {
  planner::PlannerConfig planner;
  planner.num_q_heads = config.num_q_heads;
  planner.num_kv_heads = config.num_kv_heads;
  planner.page_size = config.page_size;
  planner.mask = config.mask;
  planner.window_left = config.window_left;
  planner.window_right = config.window_right;
  planner.determinism = config.determinism;
  planner.tile = kernel.tile(config);
  planner.num_workers = num_workers;
  // Splits of about 2,048 keys (vLLM's batch-invariant constant for decode): whole tiles.
  planner.fixed_split_tokens = std::max(1, 2048 / planner.tile.kv_tokens) * planner.tile.kv_tokens;
  planner.tile_cost = kernel.tile_cost;
  planner.row_cost = kernel.row_cost;
  planner.bounds = options.bounds;
  return planner;
}

void check_options(const PrepareOptions& options) {
  if (options.num_workers < 0 || options.num_workers > kMaxWorkers) {
    core::fail(ErrorCode::kInvalidArgument, "num_workers is ", options.num_workers, "; it must be from 0 to ",
               kMaxWorkers);
  }
  if (!options.bounds) return;
  const GraphBounds& bounds = *options.bounds;
  if (bounds.max_requests < 0 || bounds.max_tokens < 0 || bounds.max_q_len < 0 || bounds.max_kv_len < 0 ||
      bounds.max_shared_levels < 0) {
    core::fail(ErrorCode::kInvalidArgument, "bounds must not be negative");
  }
}

}  // namespace

AttentionOp prepare(const Context& context, const AttentionConfig& config, const PrepareOptions& options) {
  check_options(options);
  const AttentionConfig resolved = attention::resolve(config);
  const std::string forced = forced_kernel(context, options);
  const kernels::AttentionKernel& kernel = choose(resolved, forced);
  const int32_t num_workers = options.num_workers > 0 ? options.num_workers : context.concurrency();
  detail::OpState state{context, resolved, options, &kernel, planner_config(resolved, kernel, options, num_workers), 0};
  state.scratch_stride = attention::round_up_to_alignment(kernel.scratch_bytes(resolved, state.planner.tile));
  return AttentionOp(std::make_shared<const detail::OpState>(std::move(state)));
}

std::vector<KernelAnswer> explain(const Context& context, const AttentionConfig& config) {
  static_cast<void>(context);  // every kernel so far is a CPU kernel; a GPU context will ask its own
  const AttentionConfig resolved = attention::resolve(config);
  std::vector<KernelAnswer> answers;
  for (const kernels::AttentionKernel* kernel : kernels::cpu_attention_kernels())
    answers.push_back(ask(*kernel, resolved));
  return answers;
}

KvFormatAdvice recommended_kv_format(const AttentionConfig& config, const Context& context) {
  static_cast<void>(context);
  AttentionConfig resolved = attention::resolve(config);
  // The first kernel that takes the configuration in the format that it likes best: kernels stand in order of speed.
  for (const kernels::AttentionKernel* kernel : kernels::cpu_attention_kernels()) {
    resolved.kv_format = kernel->best_format;
    resolved.page_size = kernel->best_page_size;
    if (ask(*kernel, resolved).refusal.empty()) return {resolved.kv_format, resolved.page_size};
  }
  return {KvFormat::kStrided, 32};
}

const AttentionConfig& AttentionOp::config() const noexcept {
  return state_->config;
}
std::string AttentionOp::kernel_name() const {
  return state_->kernel->name;
}
DType AttentionOp::weight_dtype() const noexcept {
  return state_->kernel->weights;
}
const Context& AttentionOp::context() const noexcept {
  return state_->context;
}

}  // namespace folio::inline v0
