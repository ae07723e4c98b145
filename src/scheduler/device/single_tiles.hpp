#pragma once

#include <cstddef>
#include <cstdint>

#include "scheduler/claim_rule.hpp"
#include "scheduler/device/job.hpp"

/// Claimed plans of batches whose requests have one segment and at most one row tile each, as decode's: the same plan
/// as divide_batch and emit_items make, in fewer and shorter steps, in 32 bits. Row tiles are the requests, some
/// without work. Every CTA divides the whole batch for itself and makes a share of the work tiles, so that one
/// launch does. Batches in which anything is wrong, or too large for 32 bits, are left to divide_batch.
namespace folio::inline v0::scheduler::device {

/// What is read of the host's knowledge, close together: every line of it that is touched has to be fetched.
struct SingleInput {
  const int32_t* cu_q;
  const int32_t* q_first_pos;  ///< or null, as the next but one
  const int32_t* kv_len;
  const int32_t* first_pos;
  int32_t* lengths;  ///< of the image, as the next four
  PlanImageHeader* header;
  WorkTile* work_tiles;
  CombineTile* merges;
  int32_t* combine_sources;
  MaskBounds bounds;
  int32_t num_requests;
  int32_t num_tokens;
  int32_t max_q_len;
  int32_t max_kv_len;
  int32_t group_size;
  int32_t min_rows;
  int32_t max_rows;  ///< of the plan's requests, and of a row tile
  int32_t tile_rows;
  Divisor32 kv_tokens;
  uint32_t tile_cost;
  uint32_t row_cost;
  uint32_t start_cost;
  uint32_t start_row_cost;
  int32_t start_free_rows;
  uint32_t most_kv_tiles;  ///< of a request, so that nothing overflows 32 bits
  Divisor32 num_kv_heads;
  Divisor32 num_workers;
  Divisor32 least_claim_tiles;
  int32_t claim_budget;
  int32_t usual_rows;  ///< of a row tile
  Divisor32 usual_tile_cost;
};

/// One request's row tile, and what the row tiles before it have, per KV head.
struct SingleTile {
  uint32_t cost_before;
  int32_t row_begin;
  int32_t rows;  ///< 0: there is none
  int32_t kv_begin;
  int32_t kv_end;
  uint32_t kv_tiles;
  int32_t parts;
  int32_t claims;
  int32_t sources;
  int32_t merges;
  int32_t partial_rows;
};

using SingleLine = ClaimLineOf<uint32_t>;
using SingleRule = ClaimRuleOf<uint32_t>;
using SingleSpan = ClaimSpanOf<uint32_t>;

/// What one CTA needs besides the image.
struct SingleTiles {
  SingleRule rule;
  SingleTile of[1];  ///< [requests]
  static FOLIO_HOST_DEVICE constexpr int64_t bytes(int64_t requests) {
    return int64_t{sizeof(SingleTiles)} + requests * int64_t{sizeof(SingleTile)};
  }
};

FOLIO_HOST_DEVICE inline uint32_t kv_tile_cost(const SingleInput& in, const SingleTile& tile) {
  return in.tile_cost + static_cast<uint32_t>(tile.rows) * in.row_cost;
}

FOLIO_HOST_DEVICE inline SingleSpan span_of(const SingleInput& in, const SingleTile& tile) {
  return {tile.cost_before, tile.kv_tiles,
          tile.rows == in.usual_rows ? in.usual_tile_cost : Divisor32(kv_tile_cost(in, tile))};
}

/// Reads a request's lengths, writes them to the image where `writes` says so, and makes its row tile without what lies
/// before it. Whether all is well; if not, divide_batch writes everything again.
FOLIO_HOST_DEVICE inline bool read_single_tile(const SingleInput& in, int32_t r, bool writes, SingleTile& tile) {
  const int32_t q_begin = in.cu_q[r];
  const int32_t q_end = in.cu_q[r + 1];
  const int32_t kv_len = in.kv_len[r];
  const int32_t first_pos = in.first_pos != nullptr ? in.first_pos[r] : 0;
  const int32_t given_first = in.q_first_pos != nullptr ? in.q_first_pos[r] : 0;
  const int64_t last = int64_t{first_pos} + kv_len;  // behind the keys
  const int64_t first = in.q_first_pos != nullptr ? given_first : last - (int64_t{q_end} - q_begin);
  const int64_t end = first + q_end - q_begin;
  const bool in_order = q_begin >= 0 && q_begin <= q_end && q_end <= in.num_tokens && (r > 0 || q_begin == 0);
  const bool fits = kv_len >= 0 && kv_len <= in.max_kv_len && last < 0x7fffffff && end <= 0x7fffffff &&
                    first >= -int64_t{0x80000000} && q_end - q_begin <= in.max_q_len;
  tile = SingleTile{};
  if (!in_order || !fits) return false;
  if (writes) {
    int32_t* const lengths = in.lengths + r;
    const int32_t requests = in.num_requests;
    lengths[1] = q_end;
    lengths[requests + 1] = static_cast<int32_t>(first);
    lengths[2 * requests + 1] = kv_len;
    lengths[3 * requests + 1] = first_pos;
  }
  const int32_t rows = (q_end - q_begin) * in.group_size;
  if (rows == 0 || rows < in.min_rows || rows > in.max_rows) return true;
  const TokenRange range = visible_range({first_pos, kv_len, KvShard{}}, in.bounds, first, end - 1);
  const auto kv_begin = static_cast<uint32_t>(range.begin);
  const auto kv_end = static_cast<uint32_t>(range.end);
  tile.row_begin = q_begin * in.group_size;
  tile.rows = rows;
  tile.kv_begin = static_cast<int32_t>(kv_begin);
  tile.kv_end = static_cast<int32_t>(kv_end);
  tile.kv_tiles = kv_end == 0 ? 1 : (kv_end + in.kv_tokens - 1) / in.kv_tokens - kv_begin / in.kv_tokens;
  tile.parts = 1;
  return rows <= in.tile_rows && tile.kv_tiles <= in.most_kv_tiles;
}

FOLIO_HOST_DEVICE inline uint32_t cost_of(const SingleInput& in, const SingleTile& tile) {
  if (tile.rows == 0) return 0;
  const int32_t priced = tile.rows - in.start_free_rows;
  return in.start_cost + (priced > 0 ? static_cast<uint32_t>(priced) * in.start_row_cost : 0) +
         tile.kv_tiles * kv_tile_cost(in, tile);
}

/// All of one KV head's work, of cost `total`.
FOLIO_HOST_DEVICE inline SingleLine line_of(const SingleInput& in, uint32_t total) {
  return {.total = total,
          .num_kv_heads = static_cast<int32_t>(in.num_kv_heads),
          .num_workers = in.num_workers,
          .least_tiles = in.least_claim_tiles,
          .least_tile_cost = in.tile_cost + in.row_cost};
}

/// The rule that claim_rule() gives, a round a thread.
template <typename Group>
FOLIO_HOST_DEVICE void choose_single_rule(const SingleInput& in, SingleTiles& tiles, uint32_t total, Group& group) {
  const auto heads = static_cast<int32_t>(in.num_kv_heads);
  const SingleLine line = line_of(in, total);
  SingleRule& rule = tiles.rule;
  uint32_t piece = in.num_workers == 1u ? total : 0;  // of a single round
  if (is_short(line)) {
    int32_t parts[kPieceTrials];
    group.sum_each(parts, in.num_requests, [&](int32_t trial) {
      return [&in, &tiles, &line, piece_cost = Divisor32(trial_piece(line, trial))](int32_t r) {
        const SingleTile& tile = tiles.of[r];
        if (tile.rows == 0) return 0;
        const uint32_t tile_cost = kv_tile_cost(in, tile);
        return static_cast<int32_t>(trial_parts(piece_cost, line.least_tiles, tile.kv_tiles, tile_cost));
      };
    });
    FOLIO_UNROLL
    for (int32_t i = kPieceTrials - 1; i >= 0; --i) {
      if (static_cast<uint32_t>(parts[i] * heads) <= in.num_workers) piece = trial_piece(line, i);
    }
  }
  if (group.rank() == 0) {
    rule.least_tiles = line.least_tiles;
    rule.heads_together = heads;
    if (piece > 0) {
      rule.rounds[0] = {total, piece};
      rule.num_rounds = 1;
    }
  }
  if (piece == 0) {
    FOLIO_KEEP_LOOP
    for (int32_t i = group.rank(); i < kMostClaimRounds; i += group.size()) {
      rule.rounds[i] = claim_round(line, i);
      if (is_last_round(line, i) && (i == 0 || !is_last_round(line, i - 1))) rule.num_rounds = i + 1;
    }
  }
  group.sync();
}

/// Counts that are added up over row tiles, per KV head.
enum SingleCount { kClaimCount, kSourceCount, kMergeCount, kRowCount, kSingleCounts };

FOLIO_HOST_DEVICE inline void add_counts(int32_t (&counts)[kSingleCounts], const SingleTile& tile) {
  const bool cut = tile.parts > 1;
  counts[kClaimCount] += tile.parts;
  counts[kSourceCount] += cut ? tile.parts : 0;
  counts[kMergeCount] += cut ? 1 : 0;
  counts[kRowCount] += cut ? tile.parts * tile.rows : 0;
}

/// A row tile's parts.
FOLIO_HOST_DEVICE inline void cut_single_tile(const SingleInput& in, const SingleRule& rule, SingleTile& tile) {
  const SingleSpan span = span_of(in, tile);
  if (tile.rows > 0 && span.kv_tiles >= 2 * rule.least_tiles &&
      is_to_be_cut(rule, span.begin, span.kv_tiles * span.tile_cost)) {
    tile.parts = count_pieces(rule, span);
  }
}

/// Parts of every row tile, and what the row tiles before it have. `total`: what all have.
template <typename Group>
FOLIO_HOST_DEVICE void divide_single_tiles(const SingleInput& in, SingleTiles& tiles, int32_t (&total)[kSingleCounts],
                                           Group& group) {
  const Share share = share_of(group, in.num_requests);
  int32_t before[kSingleCounts] = {};
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    cut_single_tile(in, tiles.rule, tiles.of[r]);
    add_counts(before, tiles.of[r]);
  }
  group.sum_before(before, total);
  if (total[kSourceCount] > in.claim_budget) {
    // What comes later in the line than the budget lasts stays whole.
    int32_t spent = before[kSourceCount];
    FOLIO_UNROLL
    for (int32_t& count : before) count = 0;
    FOLIO_KEEP_LOOP
    for (int32_t r = share.begin; r < share.end; ++r) {
      SingleTile& tile = tiles.of[r];
      if (tile.parts > 1) spent += tile.parts;
      if (tile.parts > 1 && spent > in.claim_budget) tile.parts = 1;
      add_counts(before, tile);
    }
    group.sum_before(before, total);
  }
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    SingleTile& tile = tiles.of[r];
    tile.claims = before[kClaimCount];
    tile.sources = before[kSourceCount];
    tile.merges = before[kMergeCount];
    tile.partial_rows = before[kRowCount];
    add_counts(before, tile);
  }
  group.sync();
}

/// What the image says of the whole plan, apart from what is known before it is made.
FOLIO_HOST_DEVICE inline void write_counts(const SingleInput& in, const int32_t (&total)[kSingleCounts]) {
  const auto heads = static_cast<int32_t>(in.num_kv_heads);
  in.lengths[0] = 0;
  PlanView& view = in.header->view;
  view.num_tokens = in.num_requests > 0 ? in.cu_q[in.num_requests] : 0;
  view.num_work_tiles = view.num_dynamic_tiles = total[kClaimCount] * heads;
  view.num_combine_tiles = total[kMergeCount] * heads;
  view.num_partial_rows = total[kRowCount] * heads;
  in.header->num_combine_sources = total[kSourceCount] * heads;
  in.header->status = PlanStatus{};
}

/// Divides the batch: tiles, and with `writes` the image's lengths and counts. The number of work tiles, or -1 where
/// the batch is to be left to divide_batch.
template <typename Group>
FOLIO_HOST_DEVICE int32_t plan_single_tiles(const SingleInput& in, SingleTiles& tiles, bool writes, Group& group) {
  const Share share = share_of(group, in.num_requests);
  bool well = true;
  int32_t cost_before[1] = {};
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    SingleTile tile;
    well = read_single_tile(in, r, writes, tile) && well;
    tile.cost_before = static_cast<uint32_t>(cost_before[0]);
    tiles.of[r] = tile;
    if (well) cost_before[0] += static_cast<int32_t>(cost_of(in, tile));
  }
  if (!group.all_of(well)) return -1;
  int32_t cost[1];
  group.sum_before(cost_before, cost);
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) tiles.of[r].cost_before += static_cast<uint32_t>(cost_before[0]);
  choose_single_rule(in, tiles, static_cast<uint32_t>(cost[0]), group);
  int32_t total[kSingleCounts];
  divide_single_tiles(in, tiles, total, group);
  if (writes && group.rank() == group.size() - 1) write_counts(in, total);  // who has the fewest work tiles to make
  return total[kClaimCount] * static_cast<int32_t>(in.num_kv_heads);
}

/// The item of part number `part` of request r's row tile, which is `piece` of its KV tiles where there are several;
/// its merge, if it is one of several sources, goes to the image.
FOLIO_HOST_DEVICE inline WorkTile make_item_of(const SingleInput& in, const SingleTile& tile, int32_t r, int32_t head,
                                               int32_t part, const TokenRange& piece) {
  const auto heads = static_cast<int32_t>(in.num_kv_heads);
  WorkTile item{.segment = 0,
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
  const uint32_t first = static_cast<uint32_t>(tile.kv_begin) / in.kv_tokens;
  const auto begin = static_cast<int32_t>((first + static_cast<uint32_t>(piece.begin)) * in.kv_tokens);
  const uint32_t end = (first + static_cast<uint32_t>(piece.end)) * in.kv_tokens;
  if (begin > tile.kv_begin) item.kv_begin = begin;
  if (end < static_cast<uint32_t>(tile.kv_end)) item.kv_end = static_cast<int32_t>(end);
  item.partial = tile.partial_rows * heads + (head * tile.parts + part) * tile.rows;
  const int32_t source_begin = tile.sources * heads + head * tile.parts;
  in.combine_sources[source_begin + part] = item.partial;
  if (part != 0) return item;
  in.merges[tile.merges * heads + head] = {.kv_head = head,
                                           .request = r,
                                           .row_begin = tile.row_begin,
                                           .row_end = tile.row_begin + tile.rows,
                                           .source_begin = source_begin,
                                           .source_end = source_begin + tile.parts};
  return item;
}

/// Item number `index`.
FOLIO_HOST_DEVICE inline WorkTile make_single_item(const SingleInput& in, const SingleTiles& tiles, int32_t index) {
  const auto heads = static_cast<int32_t>(in.num_kv_heads);
  const auto claim = static_cast<int32_t>(static_cast<uint32_t>(index) / in.num_kv_heads);
  const SingleTile* const of = tiles.of;
  const int32_t r = last_at_or_below(in.num_requests, claim, [of](int32_t i) { return of[i].claims; });
  const SingleTile& tile = of[r];
  const int32_t part = claim - tile.claims;
  const TokenRange piece = tile.parts > 1 ? piece_of(tiles.rule, span_of(in, tile), part) : TokenRange{};
  return make_item_of(in, tile, r, index - claim * heads, part, piece);
}

}  // namespace folio::inline v0::scheduler::device
