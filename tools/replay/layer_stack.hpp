#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "folio/folio.hpp"
#include "replay/memory.hpp"
#include "replay/phase_clock.hpp"
#include "replay/step_batch.hpp"

namespace folio::replay {

/// How the KV pool is laid out.
enum class KvLayout { kRecommended, kStridedNhd, kStridedHnd, kCpuPacked };

/// The format that a layout stands for. "Recommended" asks recommended_kv_format, and is strided where the advice needs
/// larger or even pages than the config has.
KvFormat choose_format(KvLayout layout, const AttentionConfig& config, const Context& context);

/// A stack of attention layers, as a model of so many would have them.
struct StackConfig {
  int32_t num_layers = 2;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  DType q = DType::kBFloat16;
  DType kv = DType::kBFloat16;
  KvLayout layout = KvLayout::kRecommended;
  int32_t page_size = 16;
  int32_t window_left = -1;
  int32_t full_every = 0;  ///< with a window: layers l with (l + 1) % full_every == 0 have none; 0 = all have it
  float logits_soft_cap = 0.0f;
  Determinism determinism = Determinism::kRunToRun;
  uint64_t seed = 1;
  int64_t num_pages = 0;   ///< of each layer's pool
  int32_t max_tokens = 0;  ///< of a step

  bool has_window(int32_t layer) const {
    return window_left >= 0 && (full_every == 0 || (layer + 1) % full_every != 0);
  }
};

/// Scale of fp8 caches: spreads the synthetic values, within (-2, 2), over (-256, 256). A power of two: dividing is
/// exact.
inline constexpr float kFp8Scale = 1.0f / 128.0f;

/// What the plans of all layers amounted to.
struct WorkCounts {
  double flops = 0.0;         ///< 2 (head_dim_qk + head_dim_v) per (row, key) pair
  int64_t kv_bytes_read = 0;  ///< KV cache bytes that the plans' items read, shared segments counted once a row tile
  int64_t kv_bytes_written = 0;
};

/// The outputs of a layer in a step: row t is token t of the batch, [num_q_heads, head_dim_v].
struct LayerOutput {
  int32_t layer = 0;
  DType dtype = DType::kUnset;
  const std::byte* data = nullptr;
  size_t row_bytes = 0;
};
using OutputObserver = std::function<void(const StepBatch&, const LayerOutput&)>;

/// Owns the KV pool, the ops, one plan buffer per op and one workspace. Everything is allocated by the constructor.
/// Two ops at most: layers with the window and layers without.
class LayerStack {
 public:
  /// Throws what `prepare` throws, and kOutOfMemory.
  LayerStack(const Context& context, const StackConfig& config);

  /// Runs a step through all layers: makes the inputs, writes the new tokens' KV, plans, attends; calls `observe` after
  /// each layer. The plan of an op is made once a step and serves all its layers.
  void step(const StepBatch& batch, PhaseClock& clock, const OutputObserver& observe);

  /// The pieces of a step for layer 0, for benchmarks: `fill` writes the tokens' KV, `load` makes their queries,
  /// `plan_step` plans for the first op, `attend` runs it on what was loaded.
  void fill(const StepBatch& batch);
  void load(const StepBatch& batch) { make_inputs_of_q(batch, 0); }
  AttentionPlan plan_step(const StepBatch& batch) { return make_group_plan(batch, 0); }
  void attend(const StepBatch& batch, const AttentionPlan& plan) { attend_layer(batch, plan, 0); }

  const StackConfig& config() const { return config_; }
  const AttentionConfig& attention() const { return stacks_.front().op.config(); }
  std::string kernel_name() const { return stacks_.front().op.kernel_name(); }
  const WorkCounts& work() const { return work_; }
  size_t pool_bytes() const { return pool_.bytes(); }
  /// Of pool and workspace, what was touched so far.
  size_t resident_bytes() const { return pool_.resident_bytes() + workspace_.resident_bytes(); }
  size_t workspace_bytes() const { return workspace_.bytes(); }
  /// Bytes of the K and the V of one page of one layer; where they lie.
  size_t k_page_bytes() const;
  size_t v_page_bytes() const;
  const KvCacheView& cache(int32_t layer) const { return caches_[static_cast<size_t>(layer)]; }

 private:
  struct Group {
    AttentionOp op;
    PlanBuffer buffer;
  };
  void make_ops();
  void make_pool();
  void make_inputs_of_kv(const StepBatch& batch, int32_t layer);
  void make_inputs_of_q(const StepBatch& batch, int32_t layer);
  void write_layer(const StepBatch& batch, int32_t layer);
  void attend_layer(const StepBatch& batch, const AttentionPlan& plan, int32_t layer);
  AttentionPlan make_group_plan(const StepBatch& batch, size_t group);
  void count_work(const StepBatch& batch, const AttentionPlan& plan, int32_t layers);

  Context context_;
  StackConfig config_;
  std::vector<Group> stacks_;  ///< [0]: layers with the window, or all; [1]: layers without
  KvFormat format_ = KvFormat::kStrided;
  MappedMemory pool_;
  MappedMemory workspace_;
  MappedMemory k_, v_, q_, out_;
  std::vector<KvCacheView> caches_;
  WorkCounts work_;
};

/// `name` of a layout as the command line has it, and back ("recommended", "strided-nhd", "strided-hnd", "cpu-packed").
std::string_view to_string(KvLayout layout);

}  // namespace folio::replay
