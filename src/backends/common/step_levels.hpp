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

/// What a builder asks once per step: under kAuto a StepCascade for all the group's layers, otherwise none.
std::optional<StepCascade> make_step_cascade(CascadeMode mode, int32_t max_levels, std::span<const WindowOp> windows);

/// What was found, by value: the segments are the caller's to change, the tables go to `forward`.
StepCascadeLevels levels_of(const Cascade& found);

/// Room for the segments of any step's layer.
using LevelArgs = std::array<SegmentArgs, kMaxCascadeLevels + 1>;

/// The run arguments of the plan's segments: `all`, whose cache and scales they share, each with its own table.
std::span<const SegmentArgs> segment_args(const StepCascadeLevels& levels, const SegmentArgs& all, LevelArgs& room);

/// The levels over another KV cache group's table, in which requests must share the same columns. Requests with query
/// tokens count. Throws kInvalidArgument naming the first request whose pages differ, and for another row stride. O(R +
/// shared entries).
StepCascadeLevels with_block_table(const StepCascadeLevels& levels, std::span<const int32_t> query_start_loc,
                                   int32_t page_size, const BlockTableView& planned, const BlockTableView& table);

}  // namespace folio::inline v0::backends
