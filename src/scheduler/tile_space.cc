#include "scheduler/tile_space.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "scheduler/combine_tiles.hpp"
#include "scheduler/plan_storage.hpp"
#include "scheduler/static_scheduler.hpp"

namespace folio::inline v0::scheduler {

namespace {

[[noreturn]] void refuse_size() {
  core::fail(ErrorCode::kInvalidArgument,
             "the batch's work does not fit in 64-bit sums, or needs more than 2^31 - 1 work tiles: it is too large "
             "for one plan");
}

class TileSpaceBuilder {
 public:
  TileSpaceBuilder(const SchedulerConfig& config, PlanStorage::Arrays& arrays)
      : config_(config),
        arrays_(arrays),
        view_(arrays.view),
        group_size_(config.num_q_heads / config.num_kv_heads),
        fixed_splits_(config.determinism >= Determinism::kBatchInvariant) {}

  TileSpaceTotals build() {
    arrays_.ranges.clear();
    arrays_.tiles.clear();
    arrays_.blocks.clear();
    find_shared_segments();
    refuse_huge_batches();
    const bool divided = arrays_.shared.size() == 0;
    // At fixed splits a request's bits must not depend on the length of others.
    const bool takes_all = fixed_splits_ ? config_.max_rows == INT32_MAX : takes(longest_request());
    const bool plain = divided && !fixed_splits_ && view_.num_segments == 1 && !view_.segments[0].shared &&
                       view_.visible_positions == nullptr;
    if (divided || takes_all) {
      for (int32_t r = 0; r < view_.num_requests; ++r) {
        for (int64_t i = 0; i < arrays_.shared.size(); ++i) add_groups_from(i, r);
        const int32_t tokens = view_.cu_q[r + 1] - view_.cu_q[r];
        if (tokens == 0 || (divided && !takes(tokens))) continue;
        if (plain && tokens * group_size_ <= config_.tile.rows) {
          add_single_tile(r, tokens);
        } else {
          add_request(r);
        }
      }
    }
    totals_.space.num_workers = config_.num_workers;
    if (totals_.space.total > kMaxScaledCost / config_.num_workers) refuse_size();
    if (totals_.max_work_tiles > std::numeric_limits<int32_t>::max() - config_.num_workers) refuse_size();
    totals_.max_work_tiles += config_.num_workers;
    if (config_.max_splits > 0) {
      totals_.space.num_workers =
          workers_within_splits(config_.num_workers, totals_.space.total, longest_tile(), config_.max_splits);
    }
    return totals_;
  }

 private:
  /// Refuses what the sums at the end would refuse, before memory is taken for millions of row tiles: by a number of
  /// work tiles and a cost that the batch has at the least. Ordinary batches are not looked at.
  void refuse_huge_batches() const {
    constexpr int64_t kManyRowTiles = int64_t{1} << 20;
    if (int64_t{view_.num_tokens} * group_size_ / config_.tile.rows < kManyRowTiles || arrays_.shared.size() > 0)
      return;
    int64_t row_tiles = 0;
    double cost = 0;
    for (int32_t r = 0; r < view_.num_requests; ++r) {
      const int32_t tokens = view_.cu_q[r + 1] - view_.cu_q[r];
      if (!takes(tokens)) continue;
      row_tiles += int64_t{tokens} * group_size_ / config_.tile.rows;
      cost += least_cost(r);
    }
    // Room for the rounding of the sum.
    const double most = static_cast<double>(kMaxScaledCost) / config_.num_workers / config_.num_kv_heads * 1.0001;
    if (row_tiles > std::numeric_limits<int32_t>::max() / config_.num_kv_heads || cost > most) refuse_size();
  }

  /// What a request's whole row tiles cost at the least, for one KV head. In a run of row tiles the fewest keys are
  /// visible to the first or the last: masks slide over a segment's keys, so their number rises, stays and falls. Under
  /// other rules it may do anything: such segments count for nothing.
  double least_cost(int32_t request) const {
    constexpr int64_t kRuns = 256;
    const int32_t rows = config_.tile.rows;
    const int64_t row_tiles = (first_row(request + 1) - first_row(request)) / rows;
    double kv_tiles = 0;
    for (int32_t s = 0; s < view_.num_segments; ++s) {
      const auto keys_of = [&](int64_t row_tile) {
        const auto row = static_cast<int32_t>(first_row(request) + row_tile * rows);
        const TokenRange keys = visible(s, request, request, row, row + rows);
        return keys.end - keys.begin;
      };
      if (view_.segments[s].shard.world > 1) continue;  // the number wavers with the stripes
      if (arrays_.mask_bounds[s].by_query) continue;
      for (int64_t run = 0; run < kRuns; ++run) {
        const int64_t begin = row_tiles * run / kRuns;
        const int64_t end = row_tiles * (run + 1) / kRuns;
        if (begin == end) continue;
        const auto fewest = static_cast<int64_t>(std::min(keys_of(begin), keys_of(end - 1)));
        const int64_t whole = fewest / config_.tile.kv_tokens;
        kv_tiles += static_cast<double>(end - begin) * static_cast<double>(whole);
      }
    }
    return kv_tiles * static_cast<double>(cost_of_kv_tile(rows));
  }

  /// Whether the plan takes requests of so many tokens.
  bool takes(int32_t tokens) const {
    const int32_t rows = tokens * group_size_;
    return rows >= config_.min_rows && rows <= config_.max_rows;
  }

  int64_t longest_tile() const {
    int64_t longest = 0;
    for (int64_t t = 0; t < arrays_.tiles.size(); ++t) longest = std::max(longest, arrays_.tiles[t].cost());
    return longest;
  }

  int32_t longest_request() const {
    int32_t tokens = 0;
    for (int32_t r = 0; r < view_.num_requests; ++r) tokens = std::max(tokens, view_.cu_q[r + 1] - view_.cu_q[r]);
    return tokens;
  }

  int32_t first_row(int32_t request) const { return view_.cu_q[request] * group_size_; }

  /// Position of the query of packed row `row`, which belongs to `request`.
  int64_t position(int32_t request, int32_t row) const {
    const int32_t row_of_request = row - first_row(request);
    const int32_t token =
        row_of_request < group_size_ ? 0 : row_of_request / group_size_;  // decode avoids the division
    return int64_t{view_.q_first_pos[request]} + token;
  }

  /// Shared segments without any key are left out. At fixed splits they stay, because a request's bits must not
  /// depend on whether others share.
  bool is_left_out(const SegmentLengths& segment) const {
    return !fixed_splits_ &&
           std::all_of(segment.kv_len, segment.kv_len + segment.num_rows, [](int32_t kv_len) { return kv_len == 0; });
  }

  void find_shared_segments() {
    arrays_.shared.clear();
    int64_t num_groups = 0;
    for (int32_t s = 0; s < view_.num_segments; ++s) {
      if (!view_.segments[s].shared || is_left_out(view_.segments[s])) continue;
      arrays_.shared.push_back({.segment = s, .first_group_block = num_groups});
      num_groups += view_.segments[s].num_rows;
    }
    std::fill_n(arrays_.group_blocks.resize(num_groups), num_groups, kNoBlock);
  }

  /// Keys of a segment's row that are visible to rows [row_begin, row_end) of one request.
  TokenRange visible(int32_t segment, int32_t kv_row, int32_t request, int32_t row_begin, int32_t row_end) const {
    const SegmentLengths& lengths = view_.segments[segment];
    const SegmentSpan keys{lengths.first_pos[kv_row], lengths.kv_len[kv_row], lengths.shard};
    const MaskBounds& bounds = arrays_.mask_bounds[segment];
    const int64_t first = position(request, row_begin);
    const int64_t last = position(request, row_end - 1);
    if (!bounds.by_query) return visible_range(keys, bounds, first, last);  // most batches
    const auto token = static_cast<int32_t>(view_.cu_q[request] + first - view_.q_first_pos[request]);
    return visible_to_tokens(keys, bounds, view_.visible_positions, token,
                             static_cast<int32_t>(token + last - first + 1), first);
  }

  /// KV tiles that a non-empty range overlaps.
  int64_t tiles_of(const TokenRange& range) const {
    const int64_t width = config_.tile.kv_tokens;
    const int64_t before = range.begin == 0 ? 0 : narrow_div(range.begin, width);  // most begin at 0
    return narrow_div(range.end + width - 1, width) - before;
  }

  int64_t cost_of_kv_tile(int32_t rows) const { return config_.tile_cost + int64_t{rows} * config_.row_cost; }
  int64_t cost_of_start(int32_t rows) const {
    return config_.start_cost + std::max<int64_t>(0, rows - config_.start_free_rows) * config_.start_row_cost;
  }

  /// Adds a range to the row tile under construction. At fixed splits ranges begin at absolute tile boundaries.
  void add_range(RowTile& tile, int32_t segment, int32_t kv_row, TokenRange range) {
    if (range.empty()) return;
    if (fixed_splits_) range.begin -= range.begin % config_.tile.kv_tokens;
    const int64_t kv_tiles = tiles_of(range);
    tile.num_kv_tiles += kv_tiles;
    arrays_.ranges.push_back({.segment = segment,
                              .kv_row = kv_row,
                              .begin = static_cast<int32_t>(range.begin),
                              .end = static_cast<int32_t>(range.end)});
    if (fixed_splits_) {
      const int64_t split = config_.fixed_split_tokens;
      tile_work_tiles_ += tiles_touched(range, split);
      granularity_tiles_ = std::max(granularity_tiles_, std::min(kv_tiles, split / config_.tile.kv_tokens));
    } else {
      tile_work_tiles_ += 1;
      granularity_tiles_ = 1;
    }
  }

  /// Filled in place: copying would read widely what was just written narrowly, and stall on store forwarding.
  RowTile& begin_tile(int32_t request, int32_t row_begin, int32_t row_end) {
    tile_work_tiles_ = 0;
    granularity_tiles_ = 0;
    const int32_t begin = static_cast<int32_t>(arrays_.ranges.size());
    return arrays_.tiles.add() = RowTile{.request = request,
                                         .row_begin = row_begin,
                                         .row_end = row_end,
                                         .range_begin = begin,
                                         .range_end = begin,
                                         .to_partial = false,
                                         .divisible = true,
                                         .num_kv_tiles = 0,
                                         .kv_tile_cost = cost_of_kv_tile(row_end - row_begin),
                                         .start_cost = cost_of_start(row_end - row_begin),
                                         .block_offset = 0};
  }

  void end_tile(RowTile& tile, Block& block) {
    if (arrays_.ranges.size() > std::numeric_limits<int32_t>::max()) refuse_size();
    tile.range_end = static_cast<int32_t>(arrays_.ranges.size());
    tile.block_offset = block.head_cost;
    block.tile_end = static_cast<int32_t>(arrays_.tiles.size());
    block.direct = block.direct && !tile.to_partial;
    int64_t cost = 0;
    if (__builtin_mul_overflow(tile.num_kv_tiles, tile.kv_tile_cost, &cost) ||
        __builtin_add_overflow(cost, tile.num_kv_tiles > 0 ? tile.start_cost : 0, &cost) ||
        __builtin_add_overflow(block.head_cost, cost, &block.head_cost)) {
      refuse_size();
    }
    block_work_tiles_ += tile_work_tiles_;
    totals_.space.granularity = std::max(totals_.space.granularity, tile.offset_of(granularity_tiles_));
  }

  Block& begin_block() {
    block_work_tiles_ = 0;
    const int32_t begin = static_cast<int32_t>(arrays_.tiles.size());
    return arrays_.blocks.add() = Block{.tile_begin = begin,
                                        .tile_end = begin,
                                        .direct = true,
                                        .first_output_tile = totals_.num_output_tiles,
                                        .space_begin = totals_.space.total,
                                        .head_cost = 0};
  }

  void end_block(const Block& block) {
    int64_t cost = 0;
    int64_t work_tiles = 0;
    if (__builtin_mul_overflow(block.head_cost, int64_t{config_.num_kv_heads}, &cost) ||
        __builtin_add_overflow(totals_.space.total, cost, &totals_.space.total) ||
        __builtin_mul_overflow(block_work_tiles_, int64_t{config_.num_kv_heads}, &work_tiles) ||
        __builtin_add_overflow(totals_.max_work_tiles, work_tiles, &totals_.max_work_tiles)) {
      refuse_size();
    }
    totals_.num_output_tiles += int64_t{block.tile_end - block.tile_begin} * config_.num_kv_heads;
  }

  /// Adds the groups of a shared segment whose first request with rows is `request`.
  void add_groups_from(int64_t shared_index, int32_t request) {
    const SharedSegment& shared = arrays_.shared[shared_index];
    const SegmentLengths& segment = view_.segments[shared.segment];
    const int32_t group = segment.row_of_request[request];
    if (group < 0 || view_.cu_q[request + 1] == view_.cu_q[request]) return;
    int32_t& group_block = arrays_.group_blocks[shared.first_group_block + group];
    if (group_block != kNoBlock) return;
    group_block = static_cast<int32_t>(arrays_.blocks.size());
    int32_t group_end = request + 1;
    while (group_end < view_.num_requests && segment.row_of_request[group_end] == group) ++group_end;
    Block& block = begin_block();
    const int32_t end = first_row(group_end);
    int32_t owner = request;
    for (int32_t row = first_row(request); row < end;) {
      const int32_t row_end = static_cast<int32_t>(std::min<int64_t>(end, int64_t{row} + config_.tile.rows));
      while (first_row(owner + 1) <= row) ++owner;
      RowTile& tile = begin_tile(owner, row, row_end);
      tile.to_partial = true;
      tile.divisible = !fixed_splits_ || !has_earlier_shared(shared_index, request, group_end);
      add_range(tile, shared.segment, group, union_of_requests(shared.segment, group, owner, row, row_end));
      end_tile(tile, block);
      row = row_end;
    }
    end_block(block);
  }

  /// Keys of a group visible to rows [row_begin, row_end) of several requests, from `request` on: from the first
  /// visible key to the last.
  TokenRange union_of_requests(int32_t segment, int32_t group, int32_t request, int32_t row_begin,
                               int32_t row_end) const {
    TokenRange all;
    for (int32_t r = request; r < view_.num_requests && first_row(r) < row_end; ++r) {
      const int32_t begin = std::max(row_begin, first_row(r));
      const int32_t end = std::min(row_end, first_row(r + 1));
      if (begin >= end) continue;
      const TokenRange one = visible(segment, group, r, begin, end);
      if (one.empty()) continue;
      all = all.empty() ? one : TokenRange{std::min(all.begin, one.begin), std::max(all.end, one.end)};
    }
    return all;
  }

  /// Whether an earlier shared segment contributes to the requests. At fixed splits an output tile may be cut only if
  /// its result is the first folded for each of its rows: later results must be folded as one, wherever the tile
  /// space is cut.
  bool has_earlier_shared(int64_t shared_index, int32_t request_begin, int32_t request_end) const {
    for (int64_t i = 0; i < shared_index; ++i) {
      const int32_t* group = view_.segments[arrays_.shared[i].segment].row_of_request;
      for (int32_t r = request_begin; r < request_end; ++r) {
        if (group[r] >= 0) return true;
      }
    }
    return false;
  }

  /// add_request for one row tile with one segment, as in nearly all decodes: the same result with fewer branches.
  void add_single_tile(int32_t request, int32_t tokens) {
    const SegmentLengths& lengths = view_.segments[0];
    const int64_t position = view_.q_first_pos[request];
    const TokenRange range = visible_range({lengths.first_pos[request], lengths.kv_len[request], lengths.shard},
                                           arrays_.mask_bounds[0], position, position + tokens - 1);
    const int64_t kv_tiles = range.empty() ? 1 : tiles_of(range);
    const int32_t row_begin = first_row(request);
    const int32_t rows = tokens * group_size_;
    const int64_t kv_tile_cost = cost_of_kv_tile(rows);
    const int64_t start_cost = cost_of_start(rows);
    const auto place = static_cast<int32_t>(arrays_.tiles.size());
    const auto range_begin = static_cast<int32_t>(arrays_.ranges.size());
    arrays_.ranges.add() = {.segment = 0,
                            .kv_row = request,
                            .begin = static_cast<int32_t>(range.begin),
                            .end = static_cast<int32_t>(range.end)};
    arrays_.tiles.add() = {.request = request,
                           .row_begin = row_begin,
                           .row_end = row_begin + rows,
                           .range_begin = range_begin,
                           .range_end = range_begin + 1,
                           .to_partial = false,
                           .divisible = true,
                           .num_kv_tiles = kv_tiles,
                           .kv_tile_cost = kv_tile_cost,
                           .start_cost = start_cost,
                           .block_offset = 0};
    const int64_t head_cost = start_cost + kv_tiles * kv_tile_cost;  // below 2^62: three numbers of 31 bits
    arrays_.blocks.add() = {.tile_begin = place,
                            .tile_end = place + 1,
                            .direct = true,
                            .first_output_tile = totals_.num_output_tiles,
                            .space_begin = totals_.space.total,
                            .head_cost = head_cost};
    totals_.space.granularity = std::max(totals_.space.granularity, start_cost + kv_tile_cost);
    totals_.num_output_tiles += config_.num_kv_heads;
    totals_.max_work_tiles += config_.num_kv_heads;  // no more than 2^62
    int64_t cost = 0;
    if (__builtin_mul_overflow(head_cost, int64_t{config_.num_kv_heads}, &cost) ||
        __builtin_add_overflow(totals_.space.total, cost, &totals_.space.total)) {
      refuse_size();
    }
  }

  void add_request(int32_t request) {
    Block& block = begin_block();
    const int32_t end = first_row(request + 1);
    for (int32_t row = first_row(request); row < end;) {
      const int32_t row_end = static_cast<int32_t>(std::min<int64_t>(end, int64_t{row} + config_.tile.rows));
      RowTile& tile = begin_tile(request, row, row_end);
      for (int32_t s = 0; s < view_.num_segments; ++s) {
        if (!view_.segments[s].shared) add_range(tile, s, request, visible(s, request, request, row, row_end));
      }
      bool everywhere = false;
      if (arrays_.shared.size() > 0) {
        tile.to_partial = meets_shared(request, row, row_end, everywhere);
        tile.divisible = !fixed_splits_ || !tile.to_partial;
      }
      if (tile.num_kv_tiles == 0 && !everywhere) add_empty_range(tile, request);
      end_tile(tile, block);
      row = row_end;
    }
    end_block(block);
  }

  /// Rows without visible keys still need a work tile that writes their zeros.
  void add_empty_range(RowTile& tile, int32_t request) {
    const SegmentLengths& first = view_.segments[0];
    const int32_t kv_row = first.shared ? std::max(0, first.row_of_request[request]) : request;
    arrays_.ranges.push_back({.segment = 0, .kv_row = kv_row, .begin = 0, .end = 0});
    tile.num_kv_tiles = 1;
    tile_work_tiles_ = 1;
    granularity_tiles_ = 1;
  }

  /// Whether a shared segment contributes to any of rows [row_begin, row_end), and whether to each.
  bool meets_shared(int32_t request, int32_t row_begin, int32_t row_end, bool& everywhere) const {
    bool somewhere = false;
    everywhere = true;
    for (int32_t row = row_begin; row < row_end;) {
      int32_t next = row_end;
      bool here = false;
      for (int64_t i = 0; i < arrays_.shared.size(); ++i) {
        here |= shared_tile(arrays_, arrays_.shared[i], request, row, &next) != nullptr;
      }
      somewhere |= here;
      everywhere &= here;
      row = next;
    }
    return somewhere;
  }

  const SchedulerConfig& config_;
  PlanStorage::Arrays& arrays_;
  const PlanView& view_;
  const int32_t group_size_;
  const bool fixed_splits_;
  TileSpaceTotals totals_;
  int64_t tile_work_tiles_ = 0;
  int64_t block_work_tiles_ = 0;
  int64_t granularity_tiles_ = 0;
};

}  // namespace

TileSpaceTotals build_tile_space(const SchedulerConfig& config, PlanStorage::Arrays& arrays) {
  return TileSpaceBuilder(config, arrays).build();
}

}  // namespace folio::inline v0::scheduler
