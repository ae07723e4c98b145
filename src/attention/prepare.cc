#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/kernel_choice.hpp"
#include "attention/log.hpp"
#include "attention/run_args.hpp"
#include "core/error.hpp"
#include "folio/attention.hpp"
#include "folio/types/ds_mla.hpp"

namespace folio::inline v0 {
namespace {

constexpr int32_t kMaxWorkers = 1 << 16;
constexpr int32_t kMaxHeads = 1 << 16;    // keeps packed row numbers (tokens x heads of a group) far from overflow
constexpr int32_t kMaxHeadDim = 1 << 16;  // likewise for offsets inside a head; kernels offer far less
constexpr int32_t kMaxPageSize = 1 << 24;

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    core::fail(ErrorCode::kInvalidArgument, name, " is ", value, "; it must be from ", low, " to ", high);
  }
}

void check_dtype(const char* name, DType dtype) {
  if (size_of(dtype) == 0)
    core::fail(ErrorCode::kInvalidArgument, name, " is no dtype (value ", static_cast<int32_t>(dtype), ")");
}

/// Spans and flags of single requests change what causal hides: without it they would say nothing.
void check_mask_features(const AttentionConfig& config) {
  const bool causal = config.mask == MaskKind::kCausal;
  for (const Feature feature : {Feature::kSpans, Feature::kRequestCausal}) {
    core::require(causal || !config.features.has(feature), "features has ",
                  feature == Feature::kSpans ? "kSpans" : "kRequestCausal", ", but mask is ",
                  static_cast<int32_t>(config.mask), "; it needs MaskKind::kCausal");
  }
  core::require(config.span_window_left == 0 || config.features.has(Feature::kSpans), "span_window_left is ",
                config.span_window_left, ", but features lacks kSpans");
}

/// Fills in the dtypes left at kUnset and checks what no kernel could make sense of: enum values, head counts, page
/// size, windows. Throws kInvalidArgument; kUnsupported for packed pages of a size or dtype that the format does not
/// have.
AttentionConfig resolve(const AttentionConfig& config) {
  AttentionConfig out = config;
  check_range("num_kv_heads", config.num_kv_heads, 1, kMaxHeads);
  check_range("num_q_heads", config.num_q_heads, 1, kMaxHeads);
  if (config.num_q_heads % config.num_kv_heads != 0) {
    core::fail(ErrorCode::kInvalidArgument, "num_q_heads is ", config.num_q_heads,
               ", which is no multiple of num_kv_heads (", config.num_kv_heads, ")");
  }
  check_range("head_dim_qk", config.head_dim_qk, 1, kMaxHeadDim);
  check_range("head_dim_v", config.head_dim_v, 1, kMaxHeadDim);
  check_range("page_size", config.page_size, 1, kMaxPageSize);
  check_range("window_left", config.window_left, -1, INT32_MAX);
  check_range("window_right", config.window_right, -1, INT32_MAX);
  check_range("attention_chunk", config.attention_chunk, 0, INT32_MAX);
  check_range("span_window_left", config.span_window_left, -1, INT32_MAX);
  check_range("kv_format", static_cast<int64_t>(config.kv_format), 0, static_cast<int64_t>(KvFormat::kFp8DsMla));
  check_range("mask", static_cast<int64_t>(config.mask), 0, static_cast<int64_t>(MaskKind::kCustom));
  check_range("determinism", static_cast<int64_t>(config.determinism), 0,
              static_cast<int64_t>(Determinism::kScheduleInvariant));
  const Features known = Feature::kSoftCap | Feature::kAlibi | Features(Feature::kSinks) | Feature::kRopeLlama |
                         Feature::kSpans | Feature::kRequestCausal | Feature::kKvStart;
  if ((config.features.bits & ~known.bits) != 0) {
    core::fail(ErrorCode::kInvalidArgument, "features has unknown bits: ", config.features.bits & ~known.bits);
  }
  check_mask_features(config);
  const bool quantized = is_fp8(config.kv) || config.kv == DType::kInt8;
  if (out.ragged_kv == DType::kUnset) out.ragged_kv = quantized ? config.q : config.kv;
  if (out.out == DType::kUnset) out.out = is_fp8(config.q) ? DType::kBFloat16 : config.q;
  check_dtype("q", out.q);
  check_dtype("kv", out.kv);
  check_dtype("ragged_kv", out.ragged_kv);
  check_dtype("out", out.out);
  for (const auto& [name, dtype] : {std::pair{"q", out.q}, {"ragged_kv", out.ragged_kv}, {"out", out.out}}) {
    if (dtype != DType::kInt8) continue;
    core::fail(ErrorCode::kUnsupported, name, " is int8, which is a type of paged caches (kv) alone");
  }
  if (out.kv_format == KvFormat::kFp8DsMla) {
    const bool holds = out.kv == DType::kFloat8E4M3 && out.num_kv_heads == 1 && out.head_dim_qk == kDsMlaHeadDimQk &&
                       out.head_dim_v == kDsMlaLatentDim;
    core::require(holds, "kv_format is fp8_ds_mla with kv ", out.kv, ", num_kv_heads ", out.num_kv_heads,
                  ", head_dim_qk ", out.head_dim_qk, ", head_dim_v ", out.head_dim_v, "; its rows have fp8_e4m3, 1, ",
                  kDsMlaHeadDimQk, " and ", kDsMlaLatentDim);
  }
  if (out.kv_format == KvFormat::kCpuPacked) {
    const bool packable = out.kv != DType::kFloat32 && out.page_size >= 16 && out.page_size % 2 == 0;
    if (!packable) {
      core::fail(ErrorCode::kUnsupported, "packed pages of ", out.page_size, " tokens in ", out.kv,
                 "; packed pages are even, 16 tokens or more, float16, bfloat16, fp8 or int8. Strided pages take ",
                 "any size and dtype");
    }
  }
  return out;
}

/// An environment variable: a debugging aid, below what the code asks for.
std::string forced_kernel(const Context& context, const PrepareOptions& options) {
  if (!options.force_kernel.empty()) return options.force_kernel;
  if (!context.state().force_kernel.empty()) return context.state().force_kernel;
  const char* forced = std::getenv("FOLIO_FORCE_KERNEL");
  return forced == nullptr ? std::string() : std::string(forced);
}

attention::Machine machine_of(const Context& context) {
  const attention::GpuBackend* gpu = context.state().gpu.get();
  if (gpu == nullptr) return {.features = platform::cpu_features()};
  return {.compute_capability = gpu->compute_capability(), .gpu_kernels = gpu->kernels()};
}

attention::Candidate choose(const Context& context, const AttentionConfig& config, const WorkloadMix& mix,
                            const std::string& forced) {
  std::vector<attention::Candidate> candidates = attention::candidates(machine_of(context), config, mix);
  std::string names;
  for (const attention::Candidate& candidate : candidates) {
    names += (names.empty() ? "" : ", ") + candidate.answer.name;
  }
  if (!forced.empty()) {
    std::erase_if(candidates, [&](const attention::Candidate& one) { return one.answer.name != forced; });
  }
  const attention::Candidate* chosen = attention::first_choice(candidates, config);
  std::string reasons;
  for (const attention::Candidate& candidate : candidates) {
    if (&candidate == chosen) break;
    const KernelAnswer& answer = candidate.answer;
    if (answer.refusal.empty()) continue;
    attention::log(LogLevel::kDebug, "prepare: ", answer.name, " refuses: ", answer.refusal);
    reasons += (reasons.empty() ? "" : "; ") + answer.name + ": " + answer.refusal;
  }
  if (chosen != nullptr) return *chosen;
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
  scheduler.attention_chunk = config.attention_chunk;
  scheduler.span_window_left = config.span_window_left;
  scheduler.features = config.features;
  scheduler.determinism = config.determinism;
  scheduler.tile = kernel.tile(config);
  scheduler.num_workers = num_workers;
  // Splits of about 2,048 keys (vLLM's batch-invariant constant for decode): whole tiles.
  scheduler.fixed_split_tokens = std::max(1, 2048 / scheduler.tile.kv_tokens) * scheduler.tile.kv_tokens;
  scheduler.tile_cost = kernel.tile_cost;
  scheduler.row_cost = kernel.row_cost;
  scheduler.bounds = options.bounds;
  scheduler.max_splits = options.max_kv_splits;
  return scheduler;
}

/// Packed rows of a request within the bounds, at most.
int64_t most_request_rows(const AttentionConfig& config, const GraphBounds& bounds) {
  return bounds.max_q_len * (int64_t{config.num_q_heads} / config.num_kv_heads);
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
  // A graph keeps its launch: it has double-height work tiles only if its requests need them, and low ones if they
  // suffice. Above kRunToRun a request's kernel, hence its bits, must not depend on whether the op is a graph's.
  if (state.config.determinism > Determinism::kRunToRun) return scheduler;
  const std::optional<GraphBounds>& bounds = state.options.bounds;
  const int64_t max_rows = bounds ? most_request_rows(state.config, *bounds) : kernel.double_rows;
  if (max_rows > scheduler.tile.rows && max_rows <= kernel.double_rows) scheduler.tile.rows = kernel.double_rows;
  if (bounds && bounds->max_shared_levels == 0 && max_rows <= kernel.low_rows) scheduler.tile.rows = kernel.low_rows;
  return scheduler;
}

detail::Pass gpu_pass(const detail::OpState& state, const kernels::cuda::AttentionKernel& kernel, int32_t num_workers) {
  const bool allowed = state.options.allow_fp8_mma || state.context.state().allow_fp8_mma;
  return {.gpu_kernel = &kernel,
          .scheduler = gpu_scheduler_config(state, kernel, num_workers),
          .fp8_mma = allowed && kernel.fp8_mma != nullptr && kernel.fp8_mma(state.config)};
}

/// The passes of a kernel, and which requests each takes (see AttentionKernel::passes).
std::vector<detail::Pass> gpu_passes(const detail::OpState& state, const kernels::cuda::AttentionKernel& kernel,
                                     int32_t num_workers) {
  if (kernel.passes == nullptr) return {gpu_pass(state, kernel, num_workers)};
  std::span<const kernels::cuda::AttentionKernel* const> kernels = kernel.passes(state.config);
  // Where a row's bits may not depend on how tokens are chunked, one kernel takes all.
  if (state.config.determinism >= Determinism::kScheduleInvariant) kernels = kernels.first(1);
  std::vector<detail::Pass> passes;
  int32_t min_rows = 0;
  for (size_t i = kernels.size(); i-- > 0;) {
    detail::Pass pass = gpu_pass(state, *kernels[i], num_workers);
    const int32_t tile_rows = pass.scheduler.tile.rows;
    pass.scheduler.min_rows = min_rows;
    // Within such bounds no request is left for the passes before: a graph of decodes has no empty launch.
    const bool takes_rest =
        i == 0 || (state.options.bounds && most_request_rows(state.config, *state.options.bounds) <= tile_rows);
    if (!takes_rest) pass.scheduler.max_rows = tile_rows;
    passes.insert(passes.begin(), pass);
    if (takes_rest) break;
    min_rows = tile_rows + 1;
  }
  return passes;
}

void log_prepared(const detail::OpState& state) {
  if (!attention::is_logged(LogLevel::kInfo)) return;
  const AttentionConfig& c = state.config;
  attention::log(LogLevel::kInfo, "prepare: kernel ", state.kernel_name, ", ", c.num_q_heads, " q heads, ",
                 c.num_kv_heads, " KV heads, head dim ", c.head_dim_qk, "/", c.head_dim_v, ", q ", c.q, ", kv ", c.kv,
                 " ", to_string(c.kv_format), ", page size ", c.page_size, ", window_left ", c.window_left, ", ",
                 state.passes.size(), state.passes.size() == 1 ? " pass" : " passes",
                 state.options.bounds ? ", bounds" : "");
}

void check_options(const PrepareOptions& options, Determinism determinism) {
  attention::check_mix(options.mix);
  if (options.max_kv_splits < 0) {
    core::fail(ErrorCode::kInvalidArgument, "max_kv_splits is ", options.max_kv_splits,
               "; it is 0 (no bound) or the most splits");
  }
  if (options.max_kv_splits > 0 && determinism >= Determinism::kBatchInvariant) {
    core::fail(ErrorCode::kInvalidArgument, "max_kv_splits is ", options.max_kv_splits,
               " at a determinism whose splits are fixed; it must be 0 there");
  }
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
  check_options(options, config.determinism);
  const AttentionConfig resolved = resolve(config);
  const attention::Candidate chosen =
      choose(context, resolved, attention::mix_of(options, resolved.determinism), forced_kernel(context, options));
  const int32_t num_workers = options.num_workers > 0 ? options.num_workers : context.concurrency();
  detail::OpState state{.context = context, .config = resolved, .options = options};
  if (chosen.gpu != nullptr) {
    state.kernel_name = chosen.gpu->name;
    state.passes = gpu_passes(state, *chosen.gpu, num_workers);
  } else {
    state.kernel_name = chosen.cpu->name;
    scheduler::SchedulerConfig scheduler = scheduler_config(resolved, *chosen.cpu, options, num_workers);
    if (chosen.cpu->heads_together != nullptr) scheduler.heads_together = chosen.cpu->heads_together(resolved);
    scheduler.uneven_workers = true;
    state.passes.push_back({.cpu_kernel = chosen.cpu, .scheduler = scheduler});
    const scheduler::TileShape& tile = scheduler.tile;
    state.scratch_stride = attention::round_up_to_alignment(chosen.cpu->scratch_bytes(resolved, tile));
  }
  log_prepared(state);
  return AttentionOp(std::make_shared<const detail::OpState>(std::move(state)));
}

attention::Explanation attention::explain(const Machine& machine, const AttentionConfig& config,
                                          const WorkloadMix& mix) {
  check_mix(mix);
  const AttentionConfig resolved = resolve(config);
  const std::vector<Candidate> all = candidates(machine, resolved, mix);
  Explanation explanation;
  if (const Candidate* chosen = first_choice(all, resolved)) explanation.chosen = chosen->answer.name;
  for (const Candidate& candidate : all) explanation.answers.push_back(candidate.answer);
  return explanation;
}

std::vector<KernelAnswer> explain(const Context& context, const AttentionConfig& config, const WorkloadMix& mix) {
  return attention::explain(machine_of(context), config, mix).answers;
}

KvFormatAdvice recommended_kv_format(const AttentionConfig& config, const Context& context, const WorkloadMix& mix) {
  attention::check_mix(mix);
  const AttentionConfig resolved = resolve(config);
  if (context.device().type == DeviceType::kCuda) return {KvFormat::kStrided, 16};
  return attention::fastest_format(kernels::cpu_attention_kernels(), platform::cpu_features(), resolved, mix);
}

const AttentionConfig& AttentionOp::config() const noexcept {
  return state_->config;
}
std::string AttentionOp::kernel_name() const {
  return state_->kernel_name;
}
bool AttentionOp::fp8_mma() const noexcept {
  return state_->passes.front().fp8_mma;
}
DType AttentionOp::p_dtype() const noexcept {
  const detail::Pass& pass = state_->passes.front();
  if (pass.fp8_mma) return DType::kFloat8E4M3;
  return pass.gpu_kernel != nullptr ? pass.gpu_kernel->p_dtype(state_->config)
                                    : pass.cpu_kernel->p_dtype(state_->config);
}
DType AttentionOp::kv_dtype() const noexcept {
  const detail::Pass& pass = state_->passes.front();
  const bool rounds = pass.gpu_kernel != nullptr && state_->config.kv_format == KvFormat::kFp8DsMla;
  return rounds ? pass.gpu_kernel->ds_mla_dtype : DType::kFloat32;
}
const attention::GpuBackend* detail::OpState::gpu() const noexcept {
  return context.state().gpu.get();
}

const Context& AttentionOp::context() const noexcept {
  return state_->context;
}

}  // namespace folio::inline v0
