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
scheduler::SchedulerConfig scheduler_config(const AttentionConfig& config, const Kernel& kernel,
                                            const PrepareOptions& options, int32_t num_workers) {
  scheduler::SchedulerConfig scheduler;
  scheduler.num_q_heads = config.num_q_heads;
  scheduler.num_kv_heads = config.num_kv_heads;
  scheduler.page_size = config.page_size;
  scheduler.mask = config.mask;
  scheduler.window_left = config.window_left;
  scheduler.window_right = config.window_right;
  scheduler.determinism = config.determinism;
  scheduler.tile = kernel.tile(config);
  scheduler.num_workers = num_workers;
  // Splits of about 2,048 keys (vLLM's batch-invariant constant for decode): whole tiles.
  scheduler.fixed_split_tokens = std::max(1, 2048 / scheduler.tile.kv_tokens) * scheduler.tile.kv_tokens;
  scheduler.tile_cost = kernel.tile_cost;
  scheduler.row_cost = kernel.row_cost;
  scheduler.bounds = options.bounds;
  return scheduler;
}

scheduler::SchedulerConfig gpu_scheduler_config(const detail::OpState& state,
                                                const kernels::cuda::AttentionKernel& kernel, int32_t num_workers) {
  const int32_t workers = state.options.num_workers > 0 ? num_workers : num_workers * kernel.workers_per_sm;
  scheduler::SchedulerConfig scheduler = scheduler_config(state.config, kernel, state.options, workers);
  scheduler.start_cost = kernel.start_cost;
  scheduler.start_row_cost = kernel.start_row_cost;
  scheduler.start_free_rows = kernel.start_free_rows;
  scheduler.min_split_tokens = kernel.min_split_tokens;
  const int64_t token_bytes = int64_t{state.config.head_dim_qk + state.config.head_dim_v} * size_of(state.config.kv);
  scheduler.l2_swizzle_tokens = kernel.l2_swizzle_bytes / token_bytes;
  // A graph keeps its launch: there the wider items have to be what it is for. Above kRunToRun a request's kernel,
  // hence its bits, must not depend on whether the op is a graph's.
  if (state.config.determinism > Determinism::kRunToRun) return scheduler;
  const std::optional<GraphBounds>& bounds = state.options.bounds;
  const int64_t group_size = state.config.num_q_heads / state.config.num_kv_heads;
  const int64_t max_rows = bounds ? bounds->max_q_len * group_size : kernel.wide_rows;
  if (max_rows > scheduler.tile.rows && max_rows <= kernel.wide_rows) scheduler.tile.rows = kernel.wide_rows;
  return scheduler;
}

/// Who plans and runs which requests.
void choose_gpu_plans(detail::OpState& state, const kernels::cuda::AttentionKernel& kernel, int32_t num_workers) {
  state.gpu_kernel = &kernel;
  state.gpu_launched = kernel.many_rows != nullptr ? kernel.many_rows(state.config) : &kernel;
  state.scheduler = gpu_scheduler_config(state, *state.gpu_launched, num_workers);
  // Where a row's bits may not depend on how tokens are chunked, one kernel takes all.
  if (kernel.few_rows == nullptr || state.config.determinism >= Determinism::kScheduleInvariant) return;
  scheduler::SchedulerConfig few = gpu_scheduler_config(state, *kernel.few_rows, num_workers);
  const int64_t group_size = state.config.num_q_heads / state.config.num_kv_heads;
  if (state.options.bounds && state.options.bounds->max_q_len * group_size <= few.tile.rows) {
    state.gpu_launched = kernel.few_rows;
    state.scheduler = few;
    return;
  }
  few.max_rows = few.tile.rows;
  state.scheduler.min_rows = few.max_rows + 1;
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
    state.fp8_mma = (options.allow_fp8_mma || context.state().allow_fp8_mma) &&
                    state.gpu_launched->fp8_mma != nullptr && state.gpu_launched->fp8_mma(resolved);
  } else {
    state.kernel = chosen.cpu;
    state.scheduler = scheduler_config(resolved, *chosen.cpu, options, num_workers);
    state.scratch_stride = attention::round_up_to_alignment(chosen.cpu->scratch_bytes(resolved, state.scheduler.tile));
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
bool AttentionOp::fp8_mma() const noexcept {
  return state_->fp8_mma;
}
DType AttentionOp::p_dtype() const noexcept {
  if (state_->fp8_mma) return DType::kFloat8E4M3;
  return state_->gpu_kernel != nullptr ? state_->gpu_kernel->p_dtype(state_->config) : state_->kernel->p_dtype;
}
const attention::GpuBackend* detail::OpState::gpu() const noexcept {
  return context.state().gpu.get();
}

const Context& AttentionOp::context() const noexcept {
  return state_->context;
}

}  // namespace folio::inline v0
