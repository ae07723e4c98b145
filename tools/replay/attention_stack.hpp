#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "folio/distributed.hpp"
#include "folio/folio.hpp"
#include "replay/phase_clock.hpp"
#include "replay/stack_config.hpp"
#include "replay/step_batch.hpp"

namespace folio::replay {

/// What the plans of all layers amounted to.
struct WorkCounts {
  double flops = 0.0;         ///< 2 (head_dim_qk + head_dim_v) per (row, key) pair
  int64_t kv_bytes_read = 0;  ///< KV cache bytes that the plans' items read, shared segments counted once a row tile
  int64_t kv_bytes_written = 0;
  int64_t kv_bytes_read_alone = 0;  ///< what kv_bytes_read would be if every request read all its keys itself
  int64_t plans = 0;                ///< over all groups of layers
  int64_t plans_with_cascade = 0;   ///< plans with shared segments

  /// Adds what the plan without a cascade would read, in place of one with shared segments or none.
  void add_plan_alone(const StackConfig& config, const AttentionPlan& plan, int32_t layers);
  /// Adds one plan that serves so many layers.
  void add_plan(const StackConfig& config, const AttentionPlan& plan, int32_t layers);
  /// Adds the writes of so many tokens in every layer.
  void add_writes(const StackConfig& config, int32_t num_tokens);
};

/// More queries than a request has in any step.
inline constexpr int32_t kNoQueries = std::numeric_limits<int32_t>::max();

/// Which rows of a step an op computes by FP8 MMA (AttentionOp::fp8_mma): those of requests with so many
/// queries in it, or more. Not all, since a decode pass computes without it.
class Fp8Rows {
 public:
  /// kNoQueries: none. `shares_keys`: the plan has shared segments, so that one kernel, the longest request's, computes
  /// all rows.
  int32_t least_queries(const AttentionOp& op, const StepBatch& batch, bool shares_keys);

 private:
  int32_t least_queries(const AttentionOp& op);
  std::map<std::shared_ptr<const detail::OpState>, int32_t> known_;
};

/// The outputs of a layer in a step: row t is token t of the batch, [num_q_heads, head_dim_v].
struct LayerOutput {
  int32_t layer = 0;
  DType dtype = DType::kUnset;
  const std::byte* data = nullptr;
  size_t row_bytes = 0;
  int32_t fp8_mma_from = kNoQueries;  ///< Fp8Rows::least_queries of the ops that computed it
};
using OutputObserver = std::function<void(const StepBatch&, const LayerOutput&)>;

/// A stack of layers that serves steps: Folio's own calls (LayerStack) or an engine backend (BackendStack).
class AttentionStack {
 public:
  virtual ~AttentionStack() = default;
  AttentionStack(const AttentionStack&) = delete;
  AttentionStack& operator=(const AttentionStack&) = delete;

  /// Brings a step's items into the order that the stack wants them in.
  virtual void order(std::vector<StepItem>& items) = 0;

  /// Runs a step through all layers: makes the inputs, writes the new tokens' KV, plans, attends; calls `observe` after
  /// each layer.
  virtual void step(const StepBatch& batch, PhaseClock& clock, const OutputObserver& observe) = 0;

  /// Whether the replay ends here: as this process wants, or any of its peers.
  virtual bool stops(bool wanted) { return wanted; }

  virtual const StackConfig& config() const = 0;
  virtual const AttentionConfig& attention() const = 0;
  virtual std::string kernel_name() const = 0;
  virtual const WorkCounts& work() const = 0;
  virtual size_t pool_bytes() const = 0;
  virtual size_t workspace_bytes() const = 0;
  /// Of pool and workspace, what was touched so far.
  virtual size_t resident_bytes() const = 0;
  virtual const KvCacheView& cache(int32_t layer) const = 0;

  /// A kernel's name and whether its op multiplies fp8 as it is.
  static std::string kernel_label(const std::string& name, bool fp8_mma) {
    return name + (fp8_mma ? " (FP8 MMA)" : "");
  }

  /// Bytes of the K and the V of one page of one layer.
  size_t k_page_bytes() const;
  size_t v_page_bytes() const;

 protected:
  AttentionStack() = default;
};

/// A stack for the config's backend; `processes` as make_backend_stack's. Throws what `prepare` throws, kUnsupported
/// for what the backend does not take, kOutOfMemory.
std::unique_ptr<AttentionStack> make_stack(const Context& context, const StackConfig& config,
                                           distributed::ProcessGroup* processes);

}  // namespace folio::replay
