#pragma once

#include <optional>
#include <string>

#include "folio/attention.hpp"
#include "folio/verify.hpp"
#include "testing/batch_memory.hpp"
#include "testing/executors.hpp"
#include "testing/gpu_mapping.hpp"
#include "testing/kv_memory.hpp"
#include "testing/problem.hpp"

namespace folio::inline v0::verify {

/// Scratch memory that begins full of NaN and stays dirty from run to run; a run gets exactly the bytes it asks for, up
/// against a guard page.
class DirtyWorkspace {
 public:
  Workspace take(const AttentionOp& op, size_t bytes);

 private:
  GuardedBuffer memory_;
  std::optional<GpuMapping> mapping_;
};

/// One case, run in all the ways its determinism level calls for.
class CaseRunner {
 public:
  explicit CaseRunner(const ConformanceCase& conformance_case);

  /// Empty if everything holds; else what does not.
  std::string run(CaseReport& report);

 private:
  /// Plans and runs a slice; throws what the library throws.
  RunOutput execute(const AttentionOp& op, PlanBuffer& buffer, const Slice& slice);
  std::string check_main(CaseReport& report);
  std::string check_repeat();
  std::string check_alone();
  std::string check_chunked();
  std::string check_isolation();
  /// Compares rows of `output` (of `slice`) with those of the main run, bit for bit.
  std::string same_bits(const char* what, const Slice& slice, const RunOutput& output) const;
  int64_t num_rows() const;
  int32_t droppable(size_t request, int32_t q_end) const;
  bool plans_on_device() const;
  Context make_context() const;
  AttentionOp make_op(const Context& context, int32_t num_workers) const;

  ConformanceCase case_;
  Problem problem_;
  KvMemory kv_;
  SequentialExecutor in_order_;  ///< what the case names, if it is not the pool
  SequentialExecutor other_;     ///< for repetitions with another concurrency
  Slice whole_;
  AttentionOp op_;
  PlanBuffer buffer_;
  GpuMapping kv_mapping_;  ///< once for all runs: mapping costs more than most of them
  DirtyWorkspace workspace_;
  RunOutput main_;
  LseBase base_ = LseBase::kE;
};

}  // namespace folio::inline v0::verify
