#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "folio/folio.hpp"
#include "replay/attention_stack.hpp"
#include "replay/memory.hpp"
#include "replay/step_array.hpp"
#include "replay/step_inputs.hpp"

namespace folio::replay {

/// Owns the KV pool, the ops, one plan buffer per op and one workspace. Everything is allocated by the constructor, but
/// for the workspace of plans with shared segments, which grows to the largest.
/// Two ops at most: layers with the window and layers without.
class LayerStack final : public AttentionStack {
 public:
  /// Throws what `prepare` throws, and kOutOfMemory.
  LayerStack(const Context& context, const StackConfig& config);

  void order(std::vector<StepItem>&) override {}
  /// The plan of an op is made once a step and serves all its layers.
  void step(const StepBatch& batch, PhaseClock& clock, const OutputObserver& observe) override;

  /// The pieces of a step for layer 0, for benchmarks: `fill` writes the tokens' KV, `load` makes their queries,
  /// `plan_step` plans for the first op, `attend` runs it on what was loaded.
  void fill(const StepBatch& batch);
  void load(const StepBatch& batch) {
    place(batch);
    inputs_.make_q(batch, 0);
  }
  AttentionPlan plan_step(const StepBatch& batch) { return make_group_plan(batch, 0); }
  void attend(const StepBatch& batch, const AttentionPlan& plan) { attend_layer(batch, plan, 0); }

  const StackConfig& config() const override { return config_; }
  const AttentionConfig& attention() const override { return stacks_.front().op.config(); }
  std::string kernel_name() const override {
    const AttentionOp& op = stacks_.front().op;
    return kernel_label(op.kernel_name(), op.fp8_mma());
  }
  const WorkCounts& work() const override { return work_; }
  size_t pool_bytes() const override { return pool_.bytes() + token_scales_.bytes(); }
  size_t resident_bytes() const override {
    return pool_.resident_bytes() + token_scales_.resident_bytes() + workspace_.resident_bytes();
  }
  size_t workspace_bytes() const override { return workspace_.bytes(); }
  const KvCacheView& cache(int32_t layer) const override { return caches_[static_cast<size_t>(layer)]; }

 private:
  struct Group {
    Group(const Context& context, const AttentionConfig& attention, const StackConfig& config);
    AttentionOp op;
    PlanBuffer buffer;
    std::optional<backends::StepCascade> cascade;  ///< where what is shared is looked for
    PlanBuffer alone;                              ///< plans without a cascade, to count what one saves
    const Cascade* keys = nullptr;                 ///< of the last plan, where there is a cascade
  };
  size_t group_of(int32_t layer) const { return stacks_.size() == 2 && !config_.has_window(layer) ? 1 : 0; }
  int32_t layers_of(size_t group) const;
  static bool shares_keys(const Group& group) { return group.keys != nullptr && group.keys->num_levels() > 0; }
  void make_ops();
  void make_pool();
  void place(const StepBatch& batch);
  PageTableView step_table() const;
  void write_layer(const StepBatch& batch, int32_t layer);
  void attend_layer(const StepBatch& batch, const AttentionPlan& plan, int32_t layer);
  AttentionPlan make_group_plan(const StepBatch& batch, size_t group);
  void count_work(const StepBatch& batch, size_t group, const AttentionPlan& plan);
  void reserve_workspace(size_t bytes);

  Context context_;
  StackConfig config_;
  std::vector<Group> stacks_;  ///< [0]: layers with the window, or all; [1]: layers without
  KvFormat format_ = KvFormat::kStrided;
  MappedMemory pool_;
  MappedMemory token_scales_;  ///< of int8 caches: K's and V's, layer by layer
  MappedMemory workspace_;
  SharedPrefixFinder finder_;
  std::vector<int32_t> full_pages_;
  std::vector<SegmentArgs> segments_;
  StepInputs inputs_;
  std::array<StepArray, 3> arrays_;
  std::span<const int64_t> slots_;  ///< of the step, where kernels read them, like the next two
  std::span<const int32_t> indices_, indptr_;
  std::vector<KvCacheView> caches_;
  WorkCounts work_;
  Fp8Rows fp8_rows_;
};

}  // namespace folio::replay
