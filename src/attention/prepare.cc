#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
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

/// A kernel of either kind of device, with its answer. One of the pointers is null.
struct Candidate {
  KernelAnswer answer;
  const kernels::AttentionKernel* cpu = nullptr;
  const kernels::cuda::AttentionKernel* gpu = nullptr;
};

template <typename Kernel>
KernelAnswer ask(const Kernel& kernel, const std::string& missing, const AttentionConfig& config) {
  KernelAnswer answer;
  answer.name = kernel.name;
  answer.available = missing.empty();
  answer.refusal = answer.available ? kernel.refusal(config) : missing;
  return answer;
}

std::string missing_on(const attention::GpuBackend& gpu, const kernels::cuda::AttentionKernel& kernel) {
  const int32_t given = gpu.compute_capability();
  const bool newer = given > kernel.max_compute_capability;
  if (given >= kernel.min_compute_capability && !newer) return {};
  return core::message("the GPU's compute capability (times 10) is ", given, "; the kernel needs ",
                       newer ? kernel.max_compute_capability : kernel.min_compute_capability,
                       newer ? " or older" : " or newer");
}

/// Every kernel of the context's device, in order of preference.
std::vector<Candidate> candidates(const Context& context, const AttentionConfig& config) {
  std::vector<Candidate> all;
  if (const attention::GpuBackend* gpu = context.state().gpu.get()) {
    for (const kernels::cuda::AttentionKernel* kernel : gpu->kernels()) {
      all.push_back({.answer = ask(*kernel, missing_on(*gpu, *kernel), config), .cpu = nullptr, .gpu = kernel});
    }
    return all;
  }
  for (const kernels::AttentionKernel* kernel : kernels::cpu_attention_kernels()) {
    const std::string missing = kernel->unavailable(platform::cpu_features());
    all.push_back({.answer = ask(*kernel, missing, config), .cpu = kernel, .gpu = nullptr});
  }
  return all;
}

/// Whether a candidate that takes the configuration comes before those behind it.
bool is_preferred(const Candidate& candidate, const AttentionConfig& config) {
  return candidate.gpu == nullptr || candidate.gpu->preferred == nullptr || candidate.gpu->preferred(config);
}

Candidate choose(const Context& context, const AttentionConfig& config, const std::string& forced) {
  std::string reasons;
  std::string names;
  std::optional<Candidate> second_choice;
  for (const Candidate& candidate : candidates(context, config)) {
    const KernelAnswer& answer = candidate.answer;
    names += (names.empty() ? "" : ", ") + answer.name;
    if (!forced.empty() && forced != answer.name) continue;
    if (answer.refusal.empty()) {
      if (!forced.empty() || is_preferred(candidate, config)) return candidate;
      if (!second_choice) second_choice = candidate;
      continue;
    }
    reasons += (reasons.empty() ? "" : "; ") + answer.name + ": " + answer.refusal;
  }
  if (second_choice) return *second_choice;
  if (reasons.empty()) {
    core::fail(ErrorCode::kInvalidArgument, "force_kernel is \"", forced, "\"; kernels here are: ", names);
  }
  core::fail(ErrorCode::kUnsupported, "no kernel takes this configuration: ", reasons);
}

template <typename Kernel>
planner::PlannerConfig planner_config(const AttentionConfig& config, const Kernel& kernel,
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

planner::PlannerConfig gpu_planner_config(const detail::OpState& state, const kernels::cuda::AttentionKernel& kernel,
                                          int32_t num_workers) {
  const int32_t workers = state.options.num_workers > 0 ? num_workers : num_workers * kernel.workers_per_sm;
  planner::PlannerConfig planner = planner_config(state.config, kernel, state.options, workers);
  planner.start_cost = kernel.start_cost;
  planner.start_row_cost = kernel.start_row_cost;
  planner.start_free_rows = kernel.start_free_rows;
  planner.least_claim_tokens = kernel.least_claim_tokens;
  const int64_t token_bytes = int64_t{state.config.head_dim_qk + state.config.head_dim_v} * size_of(state.config.kv);
  planner.section_tokens = kernel.section_bytes / token_bytes;
  // A graph keeps its launch: there the wider items have to be what it is for. Above kRunToRun a request's kernel,
  // hence its bits, must not depend on whether the op is a graph's.
  if (state.config.determinism > Determinism::kRunToRun) return planner;
  const std::optional<GraphBounds>& bounds = state.options.bounds;
  const int64_t group_size = state.config.num_q_heads / state.config.num_kv_heads;
  const int64_t most_rows = bounds ? bounds->max_q_len * group_size : kernel.wide_rows;
  if (most_rows > planner.tile.rows && most_rows <= kernel.wide_rows) planner.tile.rows = kernel.wide_rows;
  return planner;
}

/// Who plans and runs which requests.
void choose_gpu_plans(detail::OpState& state, const kernels::cuda::AttentionKernel& kernel, int32_t num_workers) {
  state.gpu_kernel = &kernel;
  state.gpu_launched = kernel.many_rows != nullptr ? kernel.many_rows(state.config) : &kernel;
  state.planner = gpu_planner_config(state, *state.gpu_launched, num_workers);
  // Where a row's bits may not depend on how tokens are chunked, one kernel takes all.
  if (kernel.few_rows == nullptr || state.config.determinism >= Determinism::kScheduleInvariant) return;
  planner::PlannerConfig few = gpu_planner_config(state, *kernel.few_rows, num_workers);
  const int64_t group_size = state.config.num_q_heads / state.config.num_kv_heads;
  if (state.options.bounds && state.options.bounds->max_q_len * group_size <= few.tile.rows) {
    state.gpu_launched = kernel.few_rows;
    state.planner = few;
    return;
  }
  few.most_rows = few.tile.rows;
  state.planner.least_rows = few.most_rows + 1;
  state.few_rows = few;
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
  const Candidate chosen = choose(context, resolved, forced_kernel(context, options));
  const int32_t num_workers = options.num_workers > 0 ? options.num_workers : context.concurrency();
  detail::OpState state{.context = context, .config = resolved, .options = options};
  if (chosen.gpu != nullptr) {
    choose_gpu_plans(state, *chosen.gpu, num_workers);
    state.fp8_products = (options.allow_fp8_products || context.state().allow_fp8_products) &&
                         state.gpu_launched->fp8_products != nullptr && state.gpu_launched->fp8_products(resolved);
  } else {
    state.kernel = chosen.cpu;
    state.planner = planner_config(resolved, *chosen.cpu, options, num_workers);
    state.scratch_stride = attention::round_up_to_alignment(chosen.cpu->scratch_bytes(resolved, state.planner.tile));
  }
  return AttentionOp(std::make_shared<const detail::OpState>(std::move(state)));
}

std::vector<KernelAnswer> explain(const Context& context, const AttentionConfig& config) {
  std::vector<KernelAnswer> answers;
  for (const Candidate& candidate : candidates(context, attention::resolve(config))) {
    answers.push_back(candidate.answer);
  }
  return answers;
}

KvFormatAdvice recommended_kv_format(const AttentionConfig& config, const Context& context) {
  AttentionConfig resolved = attention::resolve(config);
  if (context.device().type == DeviceType::kCuda) return {KvFormat::kStrided, 16};
  // The first kernel that takes the configuration in the format that it likes best: kernels stand in order of speed.
  for (const kernels::AttentionKernel* kernel : kernels::cpu_attention_kernels()) {
    resolved.kv_format = kernel->best_format;
    resolved.page_size = kernel->best_page_size;
    if (ask(*kernel, kernel->unavailable(platform::cpu_features()), resolved).refusal.empty()) {
      return {resolved.kv_format, resolved.page_size};
    }
  }
  return {KvFormat::kStrided, 32};
}

const AttentionConfig& AttentionOp::config() const noexcept {
  return state_->config;
}
std::string AttentionOp::kernel_name() const {
  return state_->gpu_kernel != nullptr ? state_->gpu_kernel->name : state_->kernel->name;
}
bool AttentionOp::fp8_products() const noexcept {
  return state_->fp8_products;
}
DType AttentionOp::weight_dtype() const noexcept {
  if (state_->fp8_products) return DType::kFloat8E4M3;
  return state_->gpu_kernel != nullptr ? state_->gpu_kernel->weights(state_->config) : state_->kernel->weights;
}
const attention::GpuBackend* detail::OpState::gpu() const noexcept {
  return context.state().gpu.get();
}

const Context& AttentionOp::context() const noexcept {
  return state_->context;
}

}  // namespace folio::inline v0
