#pragma once

#include <cstdint>

#include "scheduler/claim_order.hpp"
#include "scheduler/device/job.hpp"
#include "scheduler/device/lengths.hpp"
#include "scheduler/device/row_tile.hpp"

/// Which request's row tiles come first where the longest do: what lpt_order computes, for requests alone.
namespace folio::inline v0::scheduler::device {

struct Longer {
  FOLIO_HOST_DEVICE LongestTile operator()(const LongestTile& a, const LongestTile& b) const { return longer(a, b); }
};

struct AddClasses {
  FOLIO_HOST_DEVICE ClassCounts operator()(const ClassCounts& a, const ClassCounts& b) const {
    ClassCounts both;
    FOLIO_KEEP_LOOP
    for (int32_t i = 0; i < kCostClasses; ++i) both.of[i] = a.of[i] + b.of[i];
    return both;
  }
};

/// Puts requests into the order of their claims: from then on DeviceScratch::tile_begin is by place in that order.
/// Returns what the longest last row tile is.
template <typename Group>
FOLIO_HOST_DEVICE LongestTile lpt_order(const Job& job, Group& group) {
  const DeviceScratch& scratch = job.scratch;
  const Share share = share_of(group, job.in.num_requests);
  LongestTile mine;
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    scratch.request_octave[r] = -1;
    const int32_t tiles = row_tiles_of(job, r);
    if (tiles == 0) continue;
    const RowTile last = make_row_tile(job, r, (tiles - 1) * job.in.tile.rows);
    const int64_t kv_tiles = tile_work(job, last).num_kv_tiles;
    const LongestTile here{offset_in_output_tile(job, last, kv_tiles), kv_tiles};
    scratch.request_octave[r] = half_octave(here.cost);
    mine = longer(mine, here);
  }
  LongestTile longest;
  group.exclusive_scan(mine, LongestTile{}, Longer(), longest);
  const int32_t octave = half_octave(longest.cost);
  // Requests without rows may stand anywhere: last, in the last class.
  const auto class_of = [&scratch, octave](int32_t r) { return cost_class(scratch.request_octave[r], octave); };
  ClassCounts counts;
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) ++counts.of[class_of(r)];
  ClassCounts all;
  ClassCounts next = group.exclusive_scan(counts, ClassCounts{}, AddClasses(), all);
  int32_t of_longer = 0;
  FOLIO_KEEP_LOOP
  for (int32_t i = 0; i < kCostClasses; ++i) {
    next.of[i] += of_longer;
    of_longer += all.of[i];
  }
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) scratch.request_at[next.of[class_of(r)]++] = r;
  group.sync();
  int32_t tiles = 0;
  FOLIO_KEEP_LOOP
  for (int32_t place = share.begin; place < share.end; ++place) tiles += row_tiles_of(job, scratch.request_at[place]);
  int32_t total = 0;
  int32_t before = group.exclusive_scan(tiles, int32_t{0}, AddTiles(), total);
  FOLIO_KEEP_LOOP
  for (int32_t place = share.begin; place < share.end; ++place) {
    scratch.tile_begin[place] = before;
    before += row_tiles_of(job, scratch.request_at[place]);
  }
  group.sync();
  return longest;
}

}  // namespace folio::inline v0::scheduler::device
