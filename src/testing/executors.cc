#include "testing/executors.hpp"

#include <numeric>
#include <vector>

namespace folio::inline v0::verify {

Context pool_context(int32_t num_threads) {
  ContextOptions options;
  options.num_threads = num_threads;
  return Context::cpu(options);
}

bool is_gpu_kernel(std::string_view name) {
  return name.starts_with("cuda");
}

Context context_of_kernel(std::string_view name) {
  return is_gpu_kernel(name) ? Context::cuda(0) : pool_context(1);
}

struct SequentialExecutor::State {
  int32_t concurrency;
  bool shuffled;
  Random random;
  std::vector<int64_t> order;

  static void parallel_for(void* self, int64_t n, ParallelBody body, void* context) {
    auto& state = *static_cast<State*>(self);
    state.order.resize(static_cast<size_t>(n));
    std::iota(state.order.begin(), state.order.end(), 0);
    for (size_t i = state.order.size(); state.shuffled && i > 1; --i) {
      std::swap(state.order[i - 1], state.order[static_cast<size_t>(state.random.below(static_cast<int32_t>(i)))]);
    }
    for (const int64_t index : state.order) body(context, index);
  }
};

SequentialExecutor::SequentialExecutor(int32_t concurrency, bool shuffled, uint64_t seed)
    : state_(std::make_shared<State>(State{concurrency, shuffled, Random(seed), {}})) {}

Context SequentialExecutor::context() const {
  ContextOptions options;
  options.executor = {state_.get(), state_->concurrency, State::parallel_for};
  return Context::cpu(options);
}

}  // namespace folio::inline v0::verify
