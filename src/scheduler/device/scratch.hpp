#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/export.hpp"
#include "scheduler/claim_rule.hpp"
#include "scheduler/partition_rule.hpp"

namespace folio::inline v0::scheduler {

/// How much there is of everything that a plan numbers in order.
struct WorkSums {
  int32_t work_tiles = 0;
  int32_t partial_rows = 0;
  int32_t sources = 0;
  int32_t combine_tiles = 0;
};

/// Where the tile space may be cut before one worker's split, and which of the places is taken.
struct CutSearch {
  CutChoices choices;  ///< around the ideal position
  int64_t below;       ///< choices.below and above as KV tiles from the output tile's begin
  int64_t above;
  int64_t price;      ///< fixed splits: partial rows that a first cut of the output tile would cost
  uint32_t followed;  ///< ChoiceMap: which choice follows from each choice of the cut before
  uint32_t taken;     ///< which of the choices is taken
  int32_t request;    ///< of the output tile that contains the ideal position
  int32_t head;
  int32_t tile;  ///< that output tile's row tile
};

/// The cut before one worker's split, and how the worker's results are numbered.
struct CutPlace {
  int64_t position;
  int32_t work_tile;     ///< work tiles of the uncut line before the one that contains or begins at the cut
  int32_t token;         ///< where in that work tile the cut is: a local token, or -1 at its begin
  int32_t output_start;  ///< work tiles of the uncut line before the output tile, if the cut lies within one, else -1
  int32_t output_end;    ///< ... and before the next output tile
  int32_t request;       ///< that output tile's
  int32_t head;
  int32_t row_begin;
  int32_t row_end;
  WorkSums before;            ///< of the earlier workers
  int32_t tail_partial;       ///< partial rows before those of the output tile that the next worker continues
  int32_t tail_combine_tile;  ///< number of that output tile's combine tile
  FOLIO_HOST_DEVICE bool inside() const { return output_start >= 0; }
};

/// Dynamic schedules: a row tile's splits, and what the row tiles before it have of everything, per KV head.
struct RowTileSplits {
  int32_t kv_tiles;
  int32_t splits;  ///< claims of its keys; 1: it is whole
  int32_t dynamic_tiles;
  int32_t continuations;  ///< work tiles that are not claimed
  int32_t sources;
  int32_t combine_tiles;
  int32_t partial_rows;
};

/// Memory of one planning on the device, besides the image. Where it fits, it lies in a CTA's shared memory
/// until the work is divided; then `kept_bytes` of it go to the image, from which work tiles are made.
struct DeviceScratch {
  CutPlace* places = nullptr;              ///< [workers + 1]; static schedule
  SplitRule* rule = nullptr;               ///< dynamic schedules, as the next two
  int64_t* cost_before = nullptr;          ///< [row tiles + 1], cost of the row tiles before, per KV head
  RowTileSplits* dynamic_tiles = nullptr;  ///< [row tiles + 1]
  int32_t* tile_begin =
      nullptr;  ///< [requests + 1], row tiles before the request at a place of the tile space, per KV head
  int32_t* tile_request = nullptr;       ///< [row tiles], the place of the request whose row tile it is
  int32_t* work_tiles_before = nullptr;  ///< [row tiles + 1], work tiles of the row tiles before, uncut, per KV head
  CutSearch* searches = nullptr;         ///< [workers + 1]; static schedule
  /// TileOrder::kLpt, as the next: [requests], the requests in order. Else a request's number is its place.
  int32_t* request_at = nullptr;
  int32_t* request_octave = nullptr;  ///< [requests], half_octave of its last row tile's cost; -1 without rows
};

struct DeviceScratchSizes {
  int64_t requests;
  int64_t row_tiles;
  int64_t workers;
  bool dynamic;
  bool lpt;
  /// What making work tiles takes: whole 16 bytes.
  FOLIO_HOST_DEVICE constexpr int64_t kept_bytes() const {
    const int64_t of_schedule =
        dynamic ? int64_t{sizeof(SplitRule)} + cost_bytes() + (row_tiles + 1) * int64_t{sizeof(RowTileSplits)}
                : (workers + 1) * int64_t{sizeof(CutPlace)};
    const int64_t ints = requests + 1 + 2 * row_tiles + 1 + (lpt ? 2 * requests : 0);
    const int64_t bytes = of_schedule + ints * int64_t{sizeof(int32_t)};
    return (bytes + 15) / 16 * 16;
  }
  FOLIO_HOST_DEVICE constexpr int64_t bytes() const {
    return kept_bytes() + (dynamic ? 0 : cost_bytes() + (workers + 1) * int64_t{sizeof(CutSearch)});
  }
  FOLIO_HOST_DEVICE constexpr int64_t cost_bytes() const { return (row_tiles + 1) * int64_t{sizeof(int64_t)}; }
};

/// Divides `memory` of sizes.bytes() bytes, aligned to 8.
FOLIO_HOST_DEVICE inline DeviceScratch carve_device_scratch(std::byte* memory, const DeviceScratchSizes& sizes) {
  DeviceScratch scratch;
  std::byte* next = memory;
  if (sizes.dynamic) {
    scratch.rule = reinterpret_cast<SplitRule*>(next);
    scratch.cost_before = reinterpret_cast<int64_t*>(scratch.rule + 1);
    scratch.dynamic_tiles = reinterpret_cast<RowTileSplits*>(scratch.cost_before + sizes.row_tiles + 1);
    next = reinterpret_cast<std::byte*>(scratch.dynamic_tiles + sizes.row_tiles + 1);
  } else {
    scratch.places = reinterpret_cast<CutPlace*>(next);
    scratch.cost_before = reinterpret_cast<int64_t*>(memory + sizes.kept_bytes());
    scratch.searches = reinterpret_cast<CutSearch*>(scratch.cost_before + sizes.row_tiles + 1);
    next = reinterpret_cast<std::byte*>(scratch.places + sizes.workers + 1);
  }
  scratch.tile_begin = reinterpret_cast<int32_t*>(next);
  scratch.tile_request = scratch.tile_begin + sizes.requests + 1;
  scratch.work_tiles_before = scratch.tile_request + sizes.row_tiles;
  if (sizes.lpt) {
    scratch.request_at = scratch.work_tiles_before + sizes.row_tiles + 1;
    scratch.request_octave = scratch.request_at + sizes.requests;
  }
  return scratch;
}

}  // namespace folio::inline v0::scheduler
