#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "folio/context.hpp"
#include "folio/types/attention.hpp"

namespace folio::inline v0 {

namespace detail {
struct OpState;
struct PlanBufferState;
}  // namespace detail

/// A kernel chosen for a configuration, with its bounds. A small shared handle; immutable, safe to use from several
/// threads at once. Made by `prepare`.
class FOLIO_API AttentionOp {
 public:
  const AttentionConfig& config() const noexcept;  ///< with the defaults (kUnset dtypes) resolved
  std::string kernel_name() const;                 ///< which kernel runs, e.g. "generic-v4"
  /// What the kernel rounds p, the probabilities of a row, to before it multiplies them by V: kFloat32, the 16-bit type
  /// of a matrix unit, or kFloat8E4M3 where fp8_mma. Their sum, hence the LSE, is float32. Rounding moves an output by
  /// up to half a unit in the last place of that type, relative to the mean of |v| weighted by p.
  DType p_dtype() const noexcept;
  /// What the kernel rounds keys and values of KvFormat::kFp8DsMla to, behind their rows' scales: kFloat32 (not at all)
  /// or kBFloat16. Others are not rounded.
  DType kv_dtype() const noexcept;
  /// Whether the op uses FP8 MMA; see PrepareOptions::allow_fp8_mma for its errors. Of an op with a prefill pass and a
  /// decode pass (cuda-sm90), the prefill pass uses it.
  bool fp8_mma() const noexcept;
  const Context& context() const noexcept;
  const detail::OpState& state() const noexcept { return *state_; }
  const std::shared_ptr<const detail::OpState>& shared_state() const noexcept { return state_; }
  explicit AttentionOp(std::shared_ptr<const detail::OpState> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const detail::OpState> state_;
};

/// Memory that plans are made into: owned by the engine, one per op. Move-only. Not safe for simultaneous use by
/// several threads. Grows while cold; once warm, planning allocates nothing.
///
/// On a GPU it is one image in device memory, which kernels read, and page-locked stages that host plans are copied
/// from. Of an op with bounds the image never moves: captured graphs keep its address. Plans of one buffer are ordered
/// by their stream, so all of them, and the runs of each, belong to one stream: a plan may be made while runs of
/// earlier ones still wait there. Destroying a buffer waits for the device.
class FOLIO_API PlanBuffer {
 public:
  explicit PlanBuffer(std::unique_ptr<detail::PlanBufferState> state);
  PlanBuffer(PlanBuffer&&) noexcept;
  PlanBuffer& operator=(PlanBuffer&&) noexcept;
  ~PlanBuffer();
  detail::PlanBufferState& state() const noexcept { return *state_; }

 private:
  std::unique_ptr<detail::PlanBufferState> state_;
};

/// One step's work, valid until its buffer is planned into again or destroyed. A small copyable handle; `run` on a
/// stale one throws kStalePlan.
class FOLIO_API AttentionPlan {
 public:
  AttentionPlan(const detail::PlanBufferState* buffer, uint64_t generation)
      : buffer_(buffer), generation_(generation) {}
  AttentionOp op() const;  ///< the op that made it, of a backend's plans too; stale or not, while the buffer lives
  const detail::PlanBufferState& buffer() const noexcept { return *buffer_; }
  uint64_t generation() const noexcept { return generation_; }

 private:
  const detail::PlanBufferState* buffer_;
  uint64_t generation_;
};

/// What a plan holds, for benchmarks, tests and curious engineers. O(work tiles).
struct PlanSummary {
  int32_t num_workers = 0;
  int32_t num_work_tiles = 0;     ///< of all workers
  int32_t num_partial_rows = 0;   ///< packed rows of splits, which are combined afterwards; 0 = nothing was split
  int32_t num_combine_tiles = 0;  ///< row ranges whose splits are combined
  int64_t kv_tokens_read = 0;     ///< of one KV head, over all work tiles: what is shared counts once per row tile
  int64_t qk_pairs = 0;           ///< (packed row, KV token) pairs, over all work tiles
};

/// Picks the kernel for a configuration. Slow (microseconds to milliseconds); once per group of layers.
/// Throws kInvalidArgument (no configuration is like this), kUnsupported (with what is offered; every kernel's reason).
FOLIO_API AttentionOp prepare(const Context& context, const AttentionConfig& config,
                              const PrepareOptions& options = {});

/// A buffer for plans of this op.
FOLIO_API PlanBuffer make_plan_buffer(const AttentionOp& op);

/// Plans one step: O(requests x segments + work tiles), whatever the context's length; reads lengths only.
/// Throws kInvalidArgument with the request's number; the buffer then holds no plan. An op or a stream that is not the
/// buffer's is refused before that, and the buffer keeps its plan.
///
/// On a GPU, host lengths (BatchView::where) are planned on the host and copied on `stream`; the arrays are free when
/// `plan` returns, which waits only where four copies of this buffer have not been made yet. Refused under capture: a
/// graph would replay this one plan. Device lengths are planned on the device, by an op with bounds, without shared
/// segments or custom masks; that may be captured, and a replay plans whatever the arrays then hold. A request whose
/// lengths are wrong or beyond the bounds gets out = 0 and LSE = -infinity (with a sink, the sink), the others are as
/// if it had no keys, and `check_plans` or the next `plan` of the buffer throws kInvalidArgument naming it, once (that
/// `plan` then makes none: call it again). `run` does not, so that a step's layers all run.
FOLIO_API AttentionPlan plan(const AttentionOp& op, const BatchView& batch, PlanBuffer& buffer, Stream stream = {});

/// Throws kInvalidArgument if a plan made on the device since the last report met a request that it could not plan (the
/// lowest of the first such plan, and what was wrong), and forgets it; likewise for what
/// ContextOptions::validate_tables found in replays of captured runs. Waits for nothing: it knows what the device has
/// done so far. For engines that replay graphs; `plan` begins with it. On a CPU there is never anything to report.
FOLIO_API void check_plans(PlanBuffer& buffer);

/// See PlanSummary. Throws kStalePlan; kUnsupported for a plan made on the device, whose lists are there.
FOLIO_API PlanSummary summary(const AttentionPlan& plan);

/// Bytes of workspace, a multiple of 256, that suffice for every plan of this op without shared segments; with bounds,
/// for every plan within them. A shared segment makes one partial result a row: without bounds, ask the plan.
FOLIO_API size_t workspace_size(const AttentionOp& op);

/// Bytes of workspace that this plan needs; never more than workspace_size(op) where that promises to suffice.
FOLIO_API size_t workspace_size(const AttentionPlan& plan);

/// To be called once on fresh workspace memory, which has the bytes that the op's smallest plan needs or more; `run`
/// checks it against its plan. Throws kWorkspaceTooSmall, kInvalidArgument (alignment).
FOLIO_API void init_workspace(const AttentionOp& op, Workspace workspace, Stream stream = {});

/// Attention of one layer. Nothing is allocated or synchronised. Arguments are checked before anything is enqueued:
/// shapes, dtypes, features; page ids are not (see validate, ContextOptions::validate_tables), nor on a GPU anything
/// that lies in device memory: tables, indptrs, scales. Throws kInvalidArgument, kStalePlan, kWorkspaceTooSmall;
/// kUnsupported for more segments than a GPU's kernels take.
FOLIO_API void run(const AttentionPlan& plan, const AttentionArgs& args, Workspace workspace, Stream stream = {});

/// Checks that every page id that `run` would read is in [0, num_pages), and that tables and indptrs are long enough.
/// O(pages). Throws kInvalidArgument naming the first bad entry. On a GPU it copies the tables to the host and waits
/// for the copies: what other streams write there must have passed. kUnsupported for plans that were made on the
/// device.
FOLIO_API void validate(const AttentionPlan& plan, const AttentionArgs& args);

/// A KV format and page size; what an engine should allocate.
struct KvFormatAdvice {
  KvFormat format = KvFormat::kStrided;
  int32_t page_size = 16;
};
/// What takes the least time for `mix` on this machine, by the kernels' measured costs. On a CPU packed pages where
/// they take less than 0.95 of the time of strided ones, which other programs read too. Throws kInvalidArgument.
FOLIO_API KvFormatAdvice recommended_kv_format(const AttentionConfig& config, const Context& context,
                                               const WorkloadMix& mix = {});

/// One kernel's answer to a configuration.
struct KernelAnswer {
  std::string name;
  bool available = false;  ///< this machine can run it
  std::string refusal;     ///< why it cannot take the configuration; empty = it can
};

/// Every kernel compiled in for the context's device, in order of preference (on a CPU for `mix`), and what it says to
/// `config`. Throws for invalid configurations and mixes only.
FOLIO_API std::vector<KernelAnswer> explain(const Context& context, const AttentionConfig& config,
                                            const WorkloadMix& mix = {});

}  // namespace folio::inline v0
