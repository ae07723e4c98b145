#include "backends/common/step_levels.hpp"

#include <algorithm>
#include <vector>

#include "core/error.hpp"

namespace folio::inline v0::backends {

void check_cascade_options(CascadeMode mode, int32_t max_levels) {
  core::require(mode >= CascadeMode::kOff && mode <= CascadeMode::kAuto, "cascade is ", static_cast<int32_t>(mode),
                "; kOff, kHeuristic and kAuto are offered");
  core::require(max_levels >= 1 && max_levels <= kMaxCascadeLevels, "max_cascade_levels is ", max_levels, "; 1 to ",
                kMaxCascadeLevels, " are offered");
}

namespace {

StepCascade make_cascade(int32_t max_levels, std::span<const WindowOp> windows) {
  std::vector<AttentionOp> ops;
  for (const WindowOp& window : windows) ops.push_back(window.op);
  StepCascadeOptions options;
  options.max_levels = max_levels;
  return StepCascade(ops, options);
}

/// What was found, by value.
StepCascadeLevels levels_of(const Cascade& found) {
  StepCascadeLevels levels;
  if (found.segments.size() == 1) return levels;
  levels.num_levels = found.num_levels();
  levels.num_segments = static_cast<int32_t>(found.segments.size());
  levels.bytes_saved = found.bytes_saved;
  std::ranges::copy(found.segments, levels.segments.begin());
  std::ranges::copy(found.tables, levels.tables.begin());
  return levels;
}

}  // namespace

StepLevels::StepLevels(int32_t max_levels, std::span<const WindowOp> windows)
    : cascade_(make_cascade(max_levels, windows)) {}

StepCascadeLevels StepLevels::find(const CommonAttentionMetadata& batch, Stream stream) {
  return levels_of(cascade_.plan(0, batch, stream));
}

StepCascadeLevels StepLevels::share(int32_t prefix_tokens, const CommonAttentionMetadata& batch, Stream stream) {
  return levels_of(cascade_.share(prefix_tokens, batch, stream));
}

std::optional<StepLevels> make_step_levels(CascadeMode mode, int32_t max_levels, std::span<const WindowOp> windows) {
  if (mode != CascadeMode::kAuto) return std::nullopt;
  return StepLevels(max_levels, windows);
}

std::span<const SegmentArgs> segment_args(const StepCascadeLevels& levels, const SegmentArgs& all, LevelArgs& room) {
  const auto count = static_cast<size_t>(levels.num_segments);
  for (size_t s = 0; s < count; ++s) {
    room[s] = all;
    room[s].table = levels.tables[s];
  }
  return std::span(room).first(count);
}

StepCascadeLevels moved_to(const BlockTableView& table, const StepCascadeLevels& levels,
                           const BlockTableView& planned) {
  // Where rows begin is part of the levels' tables.
  core::require(table.row_stride == planned.row_stride, "the block table has a row stride of ", table.row_stride,
                "; the step's shared prefixes were found in one of ", planned.row_stride);
  StepCascadeLevels moved = levels;
  for (size_t s = 0; s < static_cast<size_t>(levels.num_segments); ++s) {
    moved.tables[s].indices = table.data;
    moved.tables[s].num_indices = to_page_table(table, table.num_rows).num_indices;
  }
  return moved;
}

StepCascadeLevels with_block_table(const StepCascadeLevels& levels, std::span<const int32_t> query_start_loc,
                                   int32_t page_size, const BlockTableView& planned, const BlockTableView& table,
                                   const BlockTableView& given) {
  StepCascadeLevels moved = moved_to(given, levels, planned);
  for (size_t s = 0; s < static_cast<size_t>(levels.num_levels); ++s) {
    const KvSegment& segment = levels.segments[s];
    for (int32_t group = 0; group < segment.num_groups; ++group) {
      const int32_t first = segment.group_indptr[group];
      const int32_t first_column = segment.first_pos[group] / page_size;
      const int32_t end_column = first_column + segment.kv_len[group] / page_size;
      for (int32_t request = first; request < segment.group_indptr[group + 1]; ++request) {
        const auto at = static_cast<size_t>(request);
        if (query_start_loc[at] == query_start_loc[at + 1]) continue;  // padding
        for (int32_t column = first_column; column < end_column; ++column) {
          const int32_t page = table.data[request * table.row_stride + column];
          const int32_t expected = table.data[first * table.row_stride + column];
          core::require(page == expected, "request ", request, " has page ", page, " at column ", column, ", request ",
                        first, " page ", expected,
                        ": the step was planned for a table in which they share it; build it for this one");
        }
      }
    }
  }
  return moved;
}

}  // namespace folio::inline v0::backends
