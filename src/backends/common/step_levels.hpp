#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "backends/common/layer_plans.hpp"
#include "folio/backends/attention_metadata.hpp"
#include "folio/backends/cascade.hpp"

namespace folio::inline v0::backends {

/// Throws kInvalidArgument for values that a builder's options must not have.
void check_cascade_options(CascadeMode mode, int32_t max_levels);

/// What a builder asks once per step under kAuto, for all the group's layers.
class StepLevels {
 public:
  StepLevels(int32_t max_levels, std::span<const WindowOp> windows);

  /// What the batch's requests share, by value: the segments are the caller's to change, the tables, which the
  /// context's kernels read, go to `forward`. `batch`: as host_batch has made it. On a GPU prefixes are found in
  /// block_table_host, and where rows begin is enqueued on `stream`; the tables hold until the next call. Throws
  /// kInvalidArgument.
  StepCascadeLevels find(const CommonAttentionMetadata& batch, Stream stream);
  /// What the engine says that all share, 0 for nothing, in the form that captured graphs know. Without those and
  /// without anything shared one plain segment.
  StepCascadeLevels share(int32_t prefix_tokens, const CommonAttentionMetadata& batch, Stream stream);

 private:
  StepCascade cascade_;
};

/// Under kAuto; otherwise none.
std::optional<StepLevels> make_step_levels(CascadeMode mode, int32_t max_levels, std::span<const WindowOp> windows);

/// Room for the segments of any step's layer.
using LevelArgs = std::array<SegmentArgs, kMaxCascadeLevels + 1>;

/// The run arguments of the plan's segments: `all`, whose cache and scales they share, each with its own table.
std::span<const SegmentArgs> segment_args(const StepCascadeLevels& levels, const SegmentArgs& all, LevelArgs& room);

/// The levels over another table, laid out alike, whose pages the engine answers for. Throws kInvalidArgument for
/// another row stride than that of `planned`.
StepCascadeLevels moved_to(const BlockTableView& table, const StepCascadeLevels& levels, const BlockTableView& planned);

/// The levels over another KV cache group's table, in which requests must share the same columns. Requests with query
/// tokens count. `table` and `query_start_loc` are the host's, `given` is laid out alike, where kernels read it. Throws
/// kInvalidArgument naming the first request whose pages differ, and for another row stride. O(R + shared entries).
StepCascadeLevels with_block_table(const StepCascadeLevels& levels, std::span<const int32_t> query_start_loc,
                                   int32_t page_size, const BlockTableView& planned, const BlockTableView& table,
                                   const BlockTableView& given);

}  // namespace folio::inline v0::backends
