#pragma once

#include <memory>
#include <string_view>

#include "folio/context.hpp"
#include "testing/random.hpp"

namespace folio::inline v0::verify {

/// A context with Folio's own pool.
Context pool_context(int32_t num_threads);

/// Whether a kernel, by its name, runs on a GPU: those of CUDA begin with "cuda".
bool is_gpu_kernel(std::string_view name);

/// A context that has the kernel: the first GPU's, or one with a pool.
Context context_of_kernel(std::string_view name);

/// A context on one thread whose parallel_for takes its items in order, or in a random one; `concurrency` is what it
/// claims. An engine's executor may do either.
class SequentialExecutor {
 public:
  SequentialExecutor(int32_t concurrency, bool shuffled, uint64_t seed);
  Context context() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace folio::inline v0::verify
