#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "backends/common/context_memory.hpp"
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
  std::span<const int32_t> device_indices;  ///< instead of `indices`, borrowed until `plan`
};

/// Where a level's table lies for kernels.
struct WrapperTable {
  explicit WrapperTable(const Device& device) : indptr(device), indices(device) {}
  KernelArray indptr;
  KernelArray indices;
};

/// What a wrapper has: an op for its present configuration, the plan, the workspace, copies of the arrays.
class WrapperState {
 public:
  WrapperState(const Context& context, KvCacheLayout kv_layout);

  /// For graphs of one level: from now on batches have so many requests and no more pages; what captured calls of `run`
  /// know keeps its address. `q_len`: of every request. Nothing on a CPU.
  void fix_shape(int32_t requests, int64_t pages, int32_t q_len, int32_t page_size);

  /// Drops the plan there is: it reads the copies that are filled next. So many levels.
  void begin_plan(size_t levels) {
    plan_.reset();
    levels_.resize(levels);
  }
  /// The copies to fill before `plan`. Sizes only grow.
  std::vector<WrapperLevel>& levels() { return levels_; }
  std::vector<int32_t>& cu_q() { return cu_q_; }

  /// Checks a level's pages, and copies them.
  void copy_pages(const WrapperPages& pages, int32_t page_size, WrapperLevel& level);

  /// Plans over cu_q() and levels(). `source`: of all levels.
  void plan(KvSource source, const WrapperPlanOptions& options, const WrapperMask& mask, Stream stream);

  void run_paged(const ConstTensorView& q, const WrapperKvCache& kv_cache, const TensorView& out,
                 const WrapperRunArgs& args, Stream stream);
  void run_ragged(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const TensorView& out,
                  const WrapperRunArgs& args, Stream stream);

  size_t workspace_bytes() const { return plan_ ? workspace_size(*plan_) : 0; }
  const AttentionOp& op() const;

 private:
  void prepare_for(const AttentionConfig& config);
  void pack_mask(const WrapperMask& mask);
  void put_tables(KvSource source, Stream stream);
  void put_slopes(Stream stream);
  void reserve_workspace(const AttentionPlan& plan, Stream stream);
  KvCacheView cache_view(const WrapperKvCache& kv_cache) const;
  void run(const ConstTensorView& q, std::span<const SegmentArgs> segments, const TensorView& out,
           const WrapperRunArgs& args, Stream stream);

  Context context_;
  KvCacheLayout layout_;
  std::vector<WrapperLevel> levels_;
  std::vector<int32_t> cu_q_;
  std::vector<KvSegment> segments_;
  std::vector<SegmentArgs> segment_args_;
  std::vector<uint8_t> mask_;
  std::vector<float> slopes_;
  std::vector<WrapperTable> tables_;  ///< of each level
  KernelArray kernel_mask_;
  KernelArray kernel_slopes_;
  KernelArray kernel_cu_q_;         ///< with ALiBi: for the LSE
  KernelArray kernel_first_pos_;    ///< likewise
  std::vector<int32_t> first_pos_;  ///< [R], of the first query; with ALiBi
  std::optional<GraphBounds> bounds_;
  const uint8_t* mask_at_ = nullptr;  ///< what kernels are given of the arrays above
  const float* slopes_at_ = nullptr;
  const int32_t* cu_q_at_ = nullptr;
  const int32_t* first_pos_at_ = nullptr;
  WrapperPlanOptions options_;
  AttentionConfig config_;  ///< as prepared, dtypes not resolved
  std::optional<AttentionOp> op_;
  std::optional<PlanBuffer> buffer_;
  std::optional<AttentionPlan> plan_;
  ContextMemory workspace_;
};

}  // namespace folio::inline v0::backends::detail
