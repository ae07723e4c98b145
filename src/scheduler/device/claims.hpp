#pragma once

#include <cstdint>

#include "scheduler/claim_order.hpp"
#include "scheduler/claim_parts.hpp"
#include "scheduler/device/cuts.hpp"
#include "scheduler/device/job.hpp"
#include "scheduler/device/row_tile.hpp"

/// Claimed plans: what claim_work.cc computes, for requests alone.
namespace folio::inline v0::scheduler::device {

/// What some row tiles make of everything, per KV head.
struct ClaimSums {
  int64_t partial_rows = 0;
  int32_t claims = 0;
  int32_t followers = 0;
  int32_t sources = 0;
  int32_t merges = 0;
};
struct AddClaims {
  FOLIO_HOST_DEVICE ClaimSums operator()(const ClaimSums& a, const ClaimSums& b) const {
    return {a.partial_rows + b.partial_rows, a.claims + b.claims, a.followers + b.followers, a.sources + b.sources,
            a.merges + b.merges};
  }
};

/// The keys of a row tile, segment by segment.
struct RangesOfTile {
  const Job& job;
  const RowTile& tile;
  FOLIO_HOST_DEVICE TokenRange operator()(int32_t s) const { return key_range(job, tile, s); }
};

FOLIO_HOST_DEVICE inline ClaimChain claim_chain(const Job& job, const RowTile& tile, int32_t index) {
  return {.begin = job.scratch.cost_before[index],
          .kv_tiles = job.scratch.claims[index].kv_tiles,
          .tile_cost = kv_tile_cost(job, tile),
          .kv_tokens = job.in.tile.kv_tokens,
          .split_tokens = job.in.fixed_split_tokens,
          .num_ranges = job.in.num_segments};
}

/// Parts of a row tile as the rule would have them, of which `work tiles` are work tiles where it is whole.
FOLIO_HOST_DEVICE inline ClaimSums claim_sums(int32_t parts, int32_t work_tiles, int32_t rows) {
  if (parts == 1) return {.partial_rows = 0, .claims = 1, .followers = work_tiles - 1, .sources = 0, .merges = 0};
  return {.partial_rows = int64_t{parts} * rows, .claims = parts, .followers = 0, .sources = parts, .merges = 1};
}

/// What cutting costs, in the budget's terms.
FOLIO_HOST_DEVICE inline int64_t claim_price(const Job& job, const ClaimSums& sums) {
  return job.fixed_splits() ? sums.partial_rows : sums.sources;
}

FOLIO_HOST_DEVICE inline ClaimSums sums_of_tile(const Job& job, int32_t t) {
  const DeviceScratch& scratch = job.scratch;
  return claim_sums(scratch.claims[t].parts, scratch.items_before[t + 1] - scratch.items_before[t],
                    row_tile(job, scratch.tile_request[t], t).rows());
}

/// What the first row tile of every wave costs. By everyone, for itself.
FOLIO_HOST_DEVICE inline Waves find_waves(const Job& job, const ClaimLine& line) {
  const int64_t* const cost_before = job.scratch.cost_before;
  Waves waves;
  FOLIO_KEEP_LOOP
  for (int32_t wave = 0; wave < kWavesLookedAt; ++wave) {
    const int64_t first = first_of_wave(line, wave);
    if (first < job.num_row_tiles()) waves.cost[wave] = cost_before[first + 1] - cost_before[first];
  }
  return waves;
}

/// The rule for this batch, in the scratch.
template <typename Group>
FOLIO_HOST_DEVICE void choose_rule(const Job& job, const WorkLine& work, const Dearest& dearest, Group& group) {
  const int64_t heads = job.in.num_kv_heads;
  const bool dearest_first = job.dearest_first();
  const ClaimLine line{.total = divide(work.total, heads),
                       .num_kv_heads = job.in.num_kv_heads,
                       .num_workers = job.in.num_workers,
                       .least_tiles = job.in.least_claim_tiles,
                       .least_tile_cost = int64_t{job.in.tile_cost} + job.in.row_cost};
  const Waves waves = dearest_first ? find_waves(job, line) : Waves{};
  TrialPieces total;
  if (dearest_first ? !ends_evenly(line, waves) : is_short(line)) {
    const Share share = share_of(group, job.num_row_tiles());
    TrialPieces trials;
    FOLIO_KEEP_LOOP
    for (int32_t i = 0; i < kPieceTrials; ++i) {
      const int64_t piece = trial_piece(line, i);
      int64_t parts = 0;
      FOLIO_KEEP_LOOP
      for (int32_t t = share.begin; t < share.end; ++t) {
        const RowTile tile = row_tile(job, job.scratch.tile_request[t], t);
        parts += trial_parts(piece, line.least_tiles, int64_t{job.scratch.claims[t].kv_tiles}, kv_tile_cost(job, tile));
      }
      trials.of[i] = static_cast<int32_t>(parts < 0x7fffffff ? parts : 0x7fffffff);
    }
    group.exclusive_scan(trials, TrialPieces{}, AddTrials(), total);
  }
  if (group.rank() == 0) {
    ClaimRule& rule = *job.scratch.rule;
    rule = dearest_first ? dearest_first_rule(line, waves, total) : claim_rule(line, total);
    rule.heads_together = dearest_first ? heads_of_section(line, dearest, job.in.section_tiles) : job.in.num_kv_heads;
  }
  group.sync();
}

/// Parts, claims, partial rows and merges of every row tile. Returns the sums of all, per KV head.
template <typename Group>
FOLIO_HOST_DEVICE ClaimSums divide_claims(const Job& job, const WorkLine& line, const Dearest& dearest, Group& group) {
  const int32_t count = job.num_row_tiles();
  const Share share = share_of(group, count);
  ClaimPlace* const places = job.scratch.claims;
  choose_rule(job, line, dearest, group);
  ClaimSums sums;
  FOLIO_KEEP_LOOP
  for (int32_t t = share.begin; t < share.end; ++t) {
    const RowTile tile = row_tile(job, job.scratch.tile_request[t], t);
    places[t].parts = count_parts(*job.scratch.rule, claim_chain(job, tile, t), RangesOfTile{job, tile});
    sums = AddClaims()(sums, sums_of_tile(job, t));
  }
  ClaimSums total;
  ClaimSums before = group.exclusive_scan(sums, ClaimSums{}, AddClaims(), total);
  if (claim_price(job, total) > job.in.claim_budget) {
    // What comes later in the line than the budget lasts stays whole.
    sums = ClaimSums{};
    FOLIO_KEEP_LOOP
    for (int32_t t = share.begin; t < share.end; ++t) {
      before = AddClaims()(before, sums_of_tile(job, t));
      if (claim_price(job, before) > job.in.claim_budget) places[t].parts = 1;
      sums = AddClaims()(sums, sums_of_tile(job, t));
    }
    before = group.exclusive_scan(sums, ClaimSums{}, AddClaims(), total);
  }
  FOLIO_KEEP_LOOP
  for (int32_t t = share.begin; t < share.end; ++t) {
    places[t].claims = before.claims;
    places[t].followers = before.followers;
    places[t].sources = before.sources;
    places[t].merges = before.merges;
    places[t].partial_rows = static_cast<int32_t>(before.partial_rows);
    before = AddClaims()(before, sums_of_tile(job, t));
  }
  if (group.rank() == 0) {
    places[count].claims = total.claims;
    places[count].followers = total.followers;
  }
  group.sync();
  return total;
}

/// One of a plan's work tiles: which of which row tile's.
struct ClaimedItem {
  int32_t tile;
  int32_t head;
  int32_t part;      ///< of a row tile that is cut
  int32_t in_chain;  ///< of one that is whole: number of the item
};

FOLIO_HOST_DEVICE inline ClaimedItem find_claimed_item(const Job& job, int32_t index) {
  const int32_t heads = job.in.num_kv_heads;
  const int32_t count = job.num_row_tiles();
  const ClaimPlace* const places = job.scratch.claims;
  const int32_t num_dynamic_tiles = places[count].claims * heads;
  if (index < num_dynamic_tiles) {
    // Sections of KV heads one after the other, each with all claims.
    const int32_t together = job.scratch.rule->heads_together;
    const int32_t section = together == heads ? 0 : index / (places[count].claims * together);
    const int32_t first_head = section * together;
    const int32_t here = together < heads - first_head ? together : heads - first_head;
    const int32_t in_section = index - places[count].claims * first_head;
    const int32_t claim = in_section / here;
    const int32_t tile = last_at_or_below(count, claim, [places](int32_t t) { return places[t].claims; });
    return {tile, first_head + in_section - claim * here, claim - places[tile].claims, 0};
  }
  const int32_t follower = index - num_dynamic_tiles;
  const int32_t tile = last_at_or_below(count, follower / heads, [places](int32_t t) { return places[t].followers; });
  const int32_t a_head = places[tile + 1].followers - places[tile].followers;
  const int32_t in_tile = follower - places[tile].followers * heads;
  return {tile, in_tile / a_head, 0, in_tile % a_head + 1};
}

/// The merge of a row tile's head, and one of its sources, at the part that has them.
FOLIO_HOST_DEVICE inline void emit_claim_merge(const Job& job, const ClaimedItem& at, const RowTile& tile,
                                               int32_t partial) {
  const ClaimPlace& place = job.scratch.claims[at.tile];
  const int32_t heads = job.in.num_kv_heads;
  const int32_t source_begin = place.sources * heads + at.head * place.parts;
  job.combine_sources[source_begin + at.part] = partial;
  if (at.part != 0) return;
  job.merges[place.merges * heads + at.head] = {.kv_head = at.head,
                                                .request = tile.request,
                                                .row_begin = tile.row_begin,
                                                .row_end = tile.row_end,
                                                .source_begin = source_begin,
                                                .source_end = source_begin + place.parts};
}

/// Item number `index` of a claimed plan, and what it has of merges.
FOLIO_HOST_DEVICE inline void emit_claimed_item(const Job& job, int32_t index) {
  const ClaimedItem at = find_claimed_item(job, index);
  const ClaimPlace& place = job.scratch.claims[at.tile];
  const RowTile tile = row_tile(job, job.scratch.tile_request[at.tile], at.tile);
  const ClaimChain chain = claim_chain(job, tile, at.tile);
  const RangesOfTile ranges{job, tile};
  const bool fixed = job.fixed_splits();
  ClaimPart part;
  int32_t partial = -1;
  bool starts = true;
  bool finishes = true;
  if (place.parts > 1) {
    part = part_at(*job.scratch.rule, chain, ranges, at.part);
    partial = place.partial_rows * job.in.num_kv_heads + (at.head * place.parts + at.part) * tile.rows();
    emit_claim_merge(job, at, tile, partial);
  } else {
    const int32_t work_tiles = job.scratch.items_before[at.tile + 1] - job.scratch.items_before[at.tile];
    part = whole_item_at(chain, ranges, at.in_chain);
    starts = at.in_chain == 0;
    finishes = at.in_chain + 1 == work_tiles;
    if (!finishes) {
      const int32_t first = job.scratch.claims[job.num_row_tiles()].claims + place.followers;
      partial = first * job.in.num_kv_heads + at.head * (work_tiles - 1) + at.in_chain;
    }
  }
  job.work_tiles[index] = {.segment = part.range,
                           .kv_row = tile.request,
                           .kv_head = at.head,
                           .request = tile.request,
                           .row_begin = tile.row_begin,
                           .row_end = tile.row_end,
                           .kv_begin = static_cast<int32_t>(part.keys.begin),
                           .kv_end = static_cast<int32_t>(part.keys.end),
                           .partial = partial,
                           .flags = (starts ? kStart : 0u) | (finishes ? kFinish : 0u) | (fixed ? kFold : 0u),
                           .merge = -1};
}

}  // namespace folio::inline v0::scheduler::device
