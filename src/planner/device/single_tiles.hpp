#pragma once

#include <cstddef>
#include <cstdint>

#include "planner/claim_rule.hpp"
#include "planner/device/job.hpp"
#include "planner/device/lengths.hpp"
#include "planner/device/write_view.hpp"

/// Claimed plans of batches whose requests have one segment and at most one row tile each, as decode's: the same plan
/// as divide_batch and emit_items make, in fewer and shorter steps. Row tiles are the requests, some without work.
/// Every thread block divides the whole batch for itself and makes a share of the items, so that one launch does.
namespace folio::inline v0::planner::device {

/// One request's row tile, and what the row tiles before it have, per KV head.
struct SingleTile {
  int64_t cost_before;
  int32_t row_begin;
  int32_t rows;  ///< 0: there is none
  int32_t kv_begin;
  int32_t kv_end;
  int32_t kv_tiles;
  int32_t parts;
  int32_t claims;
  int32_t sources;
  int32_t merges;
  int32_t partial_rows;
};

/// What one thread block needs besides the image.
struct SingleTiles {
  ClaimRule rule;
  SingleTile of[1];  ///< [requests + 1]; of the last, only what the row tiles before it have
  static FOLIO_HOST_DEVICE constexpr int64_t bytes(int64_t requests) {
    return int64_t{sizeof(SingleTiles)} + requests * int64_t{sizeof(SingleTile)};
  }
};

/// Brings what lies at an address nearer without waiting for it.
FOLIO_HOST_DEVICE inline void ask_for([[maybe_unused]] const int32_t* address) {
#if defined(__CUDA_ARCH__)
  asm volatile("{.reg .b32 unused; ld.global.b32 unused, [%0];}" ::"l"(address));
#endif
}

struct SingleSums {
  int64_t cost;
  int32_t at_fault;  ///< the lowest request
  int32_t too_long;  ///< requests of more than one row tile
};
struct AddSingles {
  FOLIO_HOST_DEVICE SingleSums operator()(const SingleSums& a, const SingleSums& b) const {
    return {a.cost + b.cost, a.at_fault < b.at_fault ? a.at_fault : b.at_fault, a.too_long + b.too_long};
  }
};

/// The row tile of a request whose queries are [q_begin, q_end), without what lies before it.
FOLIO_HOST_DEVICE inline SingleTile make_single_tile(const PlanInput& in, int32_t q_begin, int32_t q_end, int64_t first,
                                                     int32_t kv_len, int32_t first_pos) {
  SingleTile tile{};
  tile.row_begin = q_begin * in.group_size;
  tile.rows = (q_end - q_begin) * in.group_size;
  if (tile.rows < in.least_rows || tile.rows > in.most_rows) tile.rows = 0;
  if (tile.rows == 0) return tile;
  const Segment& segment = in.segments[0];
  const TokenRange range =
      visible_range({first_pos, kv_len, segment.shard}, segment.sight, first, first + (q_end - q_begin) - 1);
  tile.kv_begin = static_cast<int32_t>(range.begin);
  tile.kv_end = static_cast<int32_t>(range.end);
  tile.kv_tiles = range.empty() ? 1 : static_cast<int32_t>(tiles_touched(range, in.tile.kv_tokens));
  return tile;
}

FOLIO_HOST_DEVICE inline int64_t kv_tile_cost(const PlanInput& in, const SingleTile& tile) {
  return in.tile_cost + int64_t{tile.rows} * in.row_cost;
}

/// Reads and checks the lengths, as read_query_indptr and read_requests do. `writes`: into the image, too. The total
/// cost per KV head, and whether every request has at most one row tile; if not, nothing else is to be relied on.
template <typename Group>
FOLIO_HOST_DEVICE SingleSums read_single_tiles(const Job& job, SingleTile* tiles, bool writes, PlanStatus* sticky,
                                               Group& group) {
  const PlanInput& in = job.in;
  const Segment& segment = in.segments[0];
  const Share share = share_of(group, in.num_requests);
  int32_t largest = 0;
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    ask_for(segment.kv_len + r);
    ask_for(in.cu_q + r);
    if (segment.first_pos != nullptr) ask_for(segment.first_pos + r);
    if (in.q_first_pos != nullptr) ask_for(in.q_first_pos + r);
    largest = Maximum()(largest, believable_end(in, r));
  }
  int32_t last_end = 0;
  largest = group.exclusive_scan(largest, int32_t{0}, Maximum(), last_end);
  SingleSums sums{0, in.num_requests, 0};
  PlanStatus first_fault;
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    const int32_t q_begin = largest;
    largest = Maximum()(largest, believable_end(in, r));
    int64_t first_query = 0;
    const PlanStatus status = check_request(in, r, q_begin, largest, first_query);
    const bool planned = status.problem == PlanProblem::kNone;
    if (!planned && sums.at_fault == in.num_requests) {
      first_fault = status;
      sums.at_fault = r;
    }
    if (!planned) first_query = 0;
    const int32_t kv_len = planned ? segment.kv_len[r] : 0;
    const int32_t first_pos = planned && segment.first_pos != nullptr ? segment.first_pos[r] : 0;
    if (writes) {
      job.cu_q[r + 1] = largest;
      job.q_first_pos[r] = static_cast<int32_t>(first_query);
      job.kv_len[r] = kv_len;
      job.first_pos[r] = first_pos;
    }
    const SingleTile tile = make_single_tile(in, q_begin, largest, first_query, kv_len, first_pos);
    tiles[r] = tile;
    tiles[r].cost_before = sums.cost;
    sums.too_long += tile.rows > in.tile.rows ? 1 : 0;
    if (tile.rows == 0) continue;
    const int32_t priced = tile.rows - in.start_free_rows;
    sums.cost +=
        in.start_cost + (priced > 0 ? int64_t{priced} * in.start_row_cost : 0) + tile.kv_tiles * kv_tile_cost(in, tile);
  }
  SingleSums total{};
  const SingleSums before = group.exclusive_scan(sums, SingleSums{0, in.num_requests, 0}, AddSingles(), total);
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) tiles[r].cost_before += before.cost;
  if (!writes) return total;
  if (sums.at_fault < in.num_requests && sums.at_fault == total.at_fault) {
    job.header->status = first_fault;
    if (sticky != nullptr) *sticky = first_fault;
  }
  if (group.rank() == 0) {
    job.cu_q[0] = 0;
    if (total.at_fault == in.num_requests) job.header->status = PlanStatus{};
  }
  return total;
}

/// The rule that claim_rule() gives, a round a thread.
template <typename Group>
FOLIO_HOST_DEVICE void choose_single_rule(const Job& job, SingleTiles& tiles, int64_t total_cost, Group& group) {
  const PlanInput& in = job.in;
  const ClaimLine line{.total = total_cost,
                       .num_kv_heads = in.num_kv_heads,
                       .num_workers = in.num_workers,
                       .least_tiles = in.least_claim_tiles,
                       .least_tile_cost = int64_t{in.tile_cost} + in.row_cost};
  ClaimRule& rule = tiles.rule;
  int32_t trial = kPieceTrials;
  if (is_short(line)) {
    const Share share = share_of(group, in.num_requests);
    TrialPieces trials;
    FOLIO_KEEP_LOOP
    for (int32_t i = 0; i < kPieceTrials; ++i) {
      const ClaimRule one = piece_trial(line, i);
      int64_t parts = 0;
      FOLIO_KEEP_LOOP
      for (int32_t r = share.begin; r < share.end; ++r) {
        const SingleTile& tile = tiles.of[r];
        if (tile.rows > 0) parts += trial_parts(one, tile.kv_tiles, kv_tile_cost(in, tile));
      }
      trials.of[i] = static_cast<int32_t>(parts < 0x7fffffff ? parts : 0x7fffffff);
    }
    TrialPieces all;
    group.exclusive_scan(trials, TrialPieces{}, AddTrials(), all);
    FOLIO_KEEP_LOOP
    for (int32_t i = kPieceTrials - 1; i >= 0; --i) {
      if (int64_t{all.of[i]} * in.num_kv_heads <= in.num_workers) trial = i;
    }
  }
  if (line.num_workers == 1 || trial < kPieceTrials) {
    if (group.rank() == 0) rule = line.num_workers == 1 ? one_round(line, line.total) : piece_trial(line, trial);
  } else {
    FOLIO_KEEP_LOOP
    for (int32_t i = group.rank(); i < kMostClaimRounds; i += group.size()) {
      rule.rounds[i] = claim_round(line, i);
      if (is_last_round(line, i) && (i == 0 || !is_last_round(line, i - 1))) rule.num_rounds = i + 1;
    }
    if (group.rank() == 0) rule.least_tiles = line.least_tiles;
  }
  if (group.rank() == 0) rule.heads_together = in.num_kv_heads;
  group.sync();
}

/// What some row tiles make, per KV head.
struct SingleParts {
  int32_t claims;
  int32_t sources;
  int32_t merges;
  int32_t partial_rows;
};
struct AddSingleParts {
  FOLIO_HOST_DEVICE SingleParts operator()(const SingleParts& a, const SingleParts& b) const {
    return {a.claims + b.claims, a.sources + b.sources, a.merges + b.merges, a.partial_rows + b.partial_rows};
  }
};
FOLIO_HOST_DEVICE inline SingleParts parts_of(const SingleTile& tile) {
  if (tile.parts <= 1) return {tile.parts, 0, 0, 0};
  return {tile.parts, tile.parts, 1, tile.parts * tile.rows};
}

/// Parts of every row tile, and what the row tiles before it have.
template <typename Group>
FOLIO_HOST_DEVICE SingleParts divide_single_tiles(const Job& job, SingleTiles& tiles, Group& group) {
  const PlanInput& in = job.in;
  const Share share = share_of(group, in.num_requests);
  SingleParts sums{};
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    SingleTile& tile = tiles.of[r];
    const ClaimSpan span{tile.cost_before, tile.kv_tiles, kv_tile_cost(in, tile)};
    const bool cut = tile.rows > 0 && span.kv_tiles >= 2 * tiles.rule.least_tiles &&
                     is_to_be_cut(tiles.rule, span.begin, span.kv_tiles * span.tile_cost);
    tile.parts = cut ? count_pieces(tiles.rule, span) : tile.rows > 0 ? 1 : 0;
    sums = AddSingleParts()(sums, parts_of(tile));
  }
  SingleParts total{};
  SingleParts before = group.exclusive_scan(sums, SingleParts{}, AddSingleParts(), total);
  if (total.sources > in.claim_budget) {
    // What comes later in the line than the budget lasts stays whole.
    sums = SingleParts{};
    FOLIO_KEEP_LOOP
    for (int32_t r = share.begin; r < share.end; ++r) {
      SingleTile& tile = tiles.of[r];
      before = AddSingleParts()(before, parts_of(tile));
      if (before.sources > in.claim_budget && tile.parts > 1) tile.parts = 1;
      sums = AddSingleParts()(sums, parts_of(tile));
    }
    before = group.exclusive_scan(sums, SingleParts{}, AddSingleParts(), total);
  }
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    SingleTile& tile = tiles.of[r];
    tile.claims = before.claims;
    tile.sources = before.sources;
    tile.merges = before.merges;
    tile.partial_rows = before.partial_rows;
    before = AddSingleParts()(before, parts_of(tile));
  }
  group.sync();
  return total;
}

/// Item number `index`; its merge, if it is one of several sources, goes to the image.
FOLIO_HOST_DEVICE inline WorkItem make_single_item(const Job& job, const SingleTiles& tiles, int32_t index) {
  const PlanInput& in = job.in;
  const int32_t heads = in.num_kv_heads;
  const int32_t claim = index / heads;
  const int32_t head = index - claim * heads;
  const SingleTile* const of = tiles.of;
  const int32_t r = last_at_or_below(in.num_requests, claim, [of](int32_t i) { return of[i].claims; });
  const SingleTile& tile = of[r];
  WorkItem item{.segment = 0,
                .kv_row = r,
                .kv_head = head,
                .request = r,
                .row_begin = tile.row_begin,
                .row_end = tile.row_begin + tile.rows,
                .kv_begin = tile.kv_begin,
                .kv_end = tile.kv_end,
                .partial = -1,
                .flags = kStart | kFinish,
                .merge = -1};
  if (tile.parts == 1) return item;
  const int32_t part = claim - tile.claims;
  const ClaimSpan span{tile.cost_before, tile.kv_tiles, kv_tile_cost(in, tile)};
  const TokenRange piece = piece_of(tiles.rule, span, part);
  const int64_t width = in.tile.kv_tokens;
  const int64_t first = narrow_div(tile.kv_begin, width);
  const int64_t begin = (first + piece.begin) * width;
  const int64_t end = (first + piece.end) * width;
  if (begin > tile.kv_begin) item.kv_begin = static_cast<int32_t>(begin);
  if (end < tile.kv_end) item.kv_end = static_cast<int32_t>(end);
  item.partial = tile.partial_rows * heads + (head * tile.parts + part) * tile.rows;
  const int32_t source_begin = tile.sources * heads + head * tile.parts;
  job.merge_sources[source_begin + part] = item.partial;
  if (part != 0) return item;
  job.merges[tile.merges * heads + head] = {.kv_head = head,
                                            .request = r,
                                            .row_begin = tile.row_begin,
                                            .row_end = tile.row_begin + tile.rows,
                                            .source_begin = source_begin,
                                            .source_end = source_begin + tile.parts};
  return item;
}

/// Divides the batch: tiles, and with `writes` the image but for items and merges. The number of items, or -1 where a
/// request has more than one row tile; then nothing was written that divide_batch does not write again.
template <typename Group>
FOLIO_HOST_DEVICE int32_t plan_single_tiles(const Job& job, SingleTiles& tiles, bool writes, PlanStatus* sticky,
                                            Group& group) {
  const SingleSums sums = read_single_tiles(job, tiles.of, writes, sticky, group);
  if (sums.too_long > 0) return -1;
  choose_single_rule(job, tiles, sums.cost, group);
  const SingleParts total = divide_single_tiles(job, tiles, group);
  const int32_t heads = job.in.num_kv_heads;
  if (writes) {
    const WorkSums all{.items = total.claims * heads,
                       .partial_rows = total.partial_rows * heads,
                       .sources = total.sources * heads,
                       .merges = total.merges * heads};
    write_view(job, all, all.items, group);
  }
  return total.claims * heads;
}

}  // namespace folio::inline v0::planner::device
