#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "folio/attention.hpp"
#include "folio/backends/flashinfer/wrappers.hpp"

namespace folio::inline v0::backends::detail {

/// One level of keys: copies of what `plan` was given.
struct WrapperLevel {
  std::vector<int32_t> kv_len;        ///< [rows]
  std::vector<int32_t> first_pos;     ///< [rows], keys of earlier levels
  std::vector<int32_t> group_indptr;  ///< [rows + 1], requests of each row; empty = one a request
  std::vector<int32_t> indptr;        ///< [rows + 1], of the page table or of ragged tokens
  std::vector<int32_t> indices;
};

/// What a wrapper has: an op for its present configuration, the plan, the workspace, copies of the arrays.
class WrapperState {
 public:
  WrapperState(const Context& context, KvCacheLayout kv_layout) : context_(context), layout_(kv_layout) {}

  /// The copies to fill before `plan`. Sizes only grow.
  std::vector<WrapperLevel>& levels() { return levels_; }
  std::vector<int32_t>& cu_q() { return cu_q_; }

  /// Checks a level's pages, and copies them.
  void copy_pages(const WrapperPages& pages, int32_t page_size, WrapperLevel& level);

  /// Plans over cu_q() and levels(). `source`: of all levels.
  void plan(KvSource source, const WrapperPlanOptions& options, const WrapperMask& mask);

  void run_paged(const ConstTensorView& q, const WrapperKvCache& kv_cache, const TensorView& out,
                 const WrapperRunArgs& args);
  void run_ragged(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const TensorView& out,
                  const WrapperRunArgs& args);

  size_t workspace_bytes() const { return plan_ ? workspace_size(*plan_) : 0; }
  const AttentionOp& op() const;

 private:
  void prepare_for(const AttentionConfig& config);
  void pack_mask(const WrapperMask& mask);
  KvCacheView cache_view(const WrapperKvCache& kv_cache) const;
  void run(const ConstTensorView& q, std::span<const SegmentArgs> segments, const TensorView& out,
           const WrapperRunArgs& args);
  void shift_lse(float* lse) const;

  Context context_;
  KvCacheLayout layout_;
  std::vector<WrapperLevel> levels_;
  std::vector<int32_t> cu_q_;
  std::vector<KvSegment> segments_;
  std::vector<SegmentArgs> segment_args_;
  std::vector<uint8_t> mask_;
  std::vector<float> slopes_;
  WrapperPlanOptions options_;
  AttentionConfig config_;  ///< as prepared, dtypes not resolved
  std::optional<AttentionOp> op_;
  std::optional<PlanBuffer> buffer_;
  std::optional<AttentionPlan> plan_;
  core::AlignedBuffer workspace_;
};

}  // namespace folio::inline v0::backends::detail
