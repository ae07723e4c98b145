#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backends/common/context_memory.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/token_pool/kv_lists.hpp"
#include "folio/attention.hpp"

namespace folio::inline v0::backends::token_pool {

/// One layer's call: tensors with heads apart.
struct LayerCall {
  ConstTensorView q, k, v;
  TensorView out;
  float sm_scale = 0.0f;
  float logit_cap = 0.0f;
  KvCacheView cache;
  Scale k_scale, v_scale;
};

/// The bounds of captured batches.
struct FixedShape {
  int32_t max_requests = 0;
  int32_t max_tokens = 0;
  int32_t max_q_len = 0;
};

/// One way for a group of layers to read a step's keys: an op, or attention over ranks, its lists and its plan. Steps
/// are planned for it when they need it.
class KvReading {
 public:
  KvReading(const Context& context, const TokenPoolConfig& config, const ReadingKind& kind, const ListMemory& memory,
            const std::optional<FixedShape>& shape);

  /// Makes it the step's. Throws what KvLists::build and plan throw. Over ranks of GPUs collective.
  void plan(const Step& step, uint64_t number, Stream stream);
  bool is_planned(uint64_t number) const { return (plan_ || rank_plan_) && number_ == number; }

  /// Throws kInvalidArgument, on the host, if the step's lists name pages that a layer's cache does not have. O(1)
  /// where the batch named a pool of that size or a smaller one, else O(entries), once.
  void check_pages(int64_t num_pages);

  /// Throws what plans on the device have reported since they were last looked at.
  void check_plans();

  /// Of every plan; over ranks, in steps that are not captured, of the present one.
  size_t workspace_bytes() const;
  /// To be called once on a workspace of its own or of its like, before the first run.
  void init_workspace(Workspace workspace, Stream stream);
  void run(const LayerCall& call, Workspace workspace, Stream stream);

  const ReadingKind& kind() const { return kind_; }
  const AttentionOp& op() const { return op_; }  ///< over ranks: that of this rank's keys
  KvWrapper wrapper() const { return lists_.wrapper(); }

 private:
  void plan_undivided(const Step& step, bool device_lengths, Stream stream);
  void plan_over_ranks(const Step& step, bool device_lengths, Stream stream);
  void plan_tree(const Step& step, BatchView& view, Stream stream);
  /// A tree's window counts depths: it is in bits of its own, made on the host.
  bool is_windowed_tree() const { return kind_.mask == MaskKind::kCustom && kind_.role == WrapperRole::kWindow; }

  const TokenPoolConfig* config_;
  ReadingKind kind_;
  std::optional<distributed::DcpAttention> ranks_;  ///< where keys are divided over several
  AttentionOp op_;
  std::optional<PlanBuffer> buffer_;  ///< where they are not
  KvLists lists_;
  bool fixed_;
  bool on_host_;
  std::array<KvSegment, 2> segments_;
  size_t num_segments_ = 1;
  std::array<SegmentArgs, 2> args_;
  std::vector<int32_t> tail_len_;
  std::span<const uint8_t> mask_;  ///< of the step
  std::vector<uint8_t> own_mask_;
  ContextMemory gpu_mask_;  ///< on a GPU the same
  std::optional<AttentionPlan> plan_;
  std::optional<DcpWindowPlan> rank_plan_;  ///< in its place, over ranks
  uint64_t number_ = 0;
  int64_t checked_pages_ = 0;  ///< the step's pages are below this; 0 = not known
};

}  // namespace folio::inline v0::backends::token_pool
