#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "attention/log.hpp"
#include "attention/op_state.hpp"
#include "core/error.hpp"
#include "platform/cpu_count.hpp"
#include "platform/cpu_features.hpp"
#include "platform/thread_placement.hpp"

namespace folio::inline v0 {

namespace {

constexpr int32_t kMaxThreads = platform::ThreadPool::kMaxThreads;
constexpr int32_t kMaxConcurrency = 65536;

void validate(const ContextOptions& options) {
  core::require(options.num_threads >= 0 && options.num_threads <= kMaxThreads, "num_threads is ", options.num_threads,
                "; 1 to ", kMaxThreads, ", or 0 for as many as the process may run on");
  const Executor& executor = options.executor;
  if (executor.parallel_for != nullptr) {
    core::require(options.num_threads == 0, "num_threads is ", options.num_threads,
                  " beside an executor, which brings its own threads; give one of them");
    core::require(options.pinning == ThreadPinning::kAutomatic,
                  "pinning is given beside an executor, whose threads are the engine's");
    core::require(executor.concurrency >= 1 && executor.concurrency <= kMaxConcurrency, "executor.concurrency is ",
                  executor.concurrency, "; 1 to ", kMaxConcurrency, " is taken");
  } else {
    core::require(executor.self == nullptr && executor.concurrency == 1,
                  "executor.parallel_for is null although executor.self or executor.concurrency is set");
  }
}

/// The second environment variable that Folio reads (decision 0053): it turns the check on where the code does not.
bool validates_tables(const ContextOptions& options) {
  const char* const given = std::getenv("FOLIO_VALIDATE_TABLES");
  const std::string_view text = given == nullptr ? "" : given;
  core::require(text.empty() || text == "0" || text == "1", "the environment variable FOLIO_VALIDATE_TABLES is '", text,
                "'; 0 and 1 are taken");
  return options.validate_tables || text == "1";
}

}  // namespace

#ifdef FOLIO_WITHOUT_CUDA
std::shared_ptr<const attention::GpuBackend> attention::open_gpu(int32_t index) {
  core::fail(ErrorCode::kUnavailable, "CUDA device ", index,
             ": this build has no CUDA kernels; Context::cpu is offered");
}
#endif

Context Context::cpu(const ContextOptions& options) {
  validate(options);
  auto state = std::make_shared<detail::ContextState>();
  state->force_kernel = options.force_kernel;
  state->allow_fp8_mma = options.allow_fp8_mma;
  state->validate_tables = validates_tables(options);
  if (options.executor.parallel_for != nullptr) {
    state->executor = options.executor;
  } else {
    const int32_t threads =
        options.num_threads != 0 ? options.num_threads : std::min(platform::available_cpus(), kMaxThreads);
    const std::vector<int32_t> cpus =
        platform::place_threads(threads, options.pinning, platform::affinity_mask(), platform::current_cpu());
    state->pool = std::make_unique<platform::ThreadPool>(threads, cpus);
    if (options.pinning == ThreadPinning::kPinned && !state->pool->pinned()) {
      core::fail(ErrorCode::kUnavailable, "the OS does not pin threads of this process");
    }
    state->executor = state->pool->executor();
  }
  attention::log(LogLevel::kInfo, "context: CPU, ", state->executor.concurrency,
                 state->pool == nullptr ? " threads of the engine's" : " threads",
                 state->pool != nullptr && state->pool->pinned() ? ", pinned" : "");
  return Context(std::move(state));
}

Context Context::cuda(int32_t index, const ContextOptions& options) {
  core::require(index >= 0, "CUDA device ", index, "; devices are counted from 0");
  validate(options);
  core::require(options.executor.parallel_for == nullptr && options.num_threads == 0 &&
                    options.pinning == ThreadPinning::kAutomatic,
                "an executor, num_threads or pinning is given for a GPU, which takes none of them");
  auto state = std::make_shared<detail::ContextState>();
  state->device = {DeviceType::kCuda, index};
  state->force_kernel = options.force_kernel;
  state->allow_fp8_mma = options.allow_fp8_mma;
  state->validate_tables = validates_tables(options);
  state->gpu = attention::open_gpu(index);
  attention::log(LogLevel::kInfo, "context: CUDA device ", index, ", compute capability (times 10) ",
                 state->gpu->compute_capability(), ", ", state->gpu->num_sms(), " SMs");
  return Context(std::move(state));
}

Device Context::device() const noexcept {
  return state_->device;
}

int32_t Context::concurrency() const noexcept {
  return state_->gpu == nullptr ? state_->executor.concurrency : state_->gpu->num_sms();
}

void Context::parallel_for(int64_t n, ParallelBody body, void* body_context) const {
  core::require(n >= 0, "parallel_for over ", n, " items; 0 or more are taken");
  core::require(body != nullptr, "parallel_for with a null body");
  if (state_->gpu != nullptr) {
    core::fail(ErrorCode::kUnsupported, "parallel_for on a GPU context; CPU contexts have an executor");
  }
  if (n == 0) return;
  state_->executor.parallel_for(state_->executor.self, n, body, body_context);
}

void synchronize(const Context& context, Stream stream) {
  if (const attention::GpuBackend* gpu = context.state().gpu.get()) gpu->synchronize(stream);
}

void map_host_memory(const Context& context, void* data, size_t bytes) {
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) core::fail(ErrorCode::kUnsupported, "map_host_memory on a CPU context, which has no GPU");
  gpu->map_host_memory(data, bytes);
}

void unmap_host_memory(const Context& context, void* data) noexcept {
  if (const attention::GpuBackend* gpu = context.state().gpu.get()) gpu->unmap_host_memory(data);
}

std::vector<std::string> cpu_features() {
  return platform::feature_names(platform::cpu_features());
}

}  // namespace folio::inline v0
