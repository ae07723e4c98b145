#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/export.hpp"
#include "planner/partition_rule.hpp"

namespace folio::inline v0::planner {

/// How much there is of everything that a plan numbers in order.
struct WorkSums {
  int32_t items = 0;
  int32_t partial_rows = 0;
  int32_t sources = 0;
  int32_t merges = 0;
};

/// The work line's cut before one worker's part, as the device planner finds it.
struct DeviceCut {
  CutChoices choices;     ///< around the ideal position
  int64_t ideal_kv_tile;  ///< KV tiles of the chain before the ideal position's
  int64_t price;          ///< fixed splits: partial rows that a first cut of the chain would cost
  int64_t position;       ///< the cut chosen
  uint32_t taken;         ///< which of the choices it is
  uint8_t next[4];        ///< which choice follows from each choice of the cut before
  int32_t request;        ///< of the chain that contains the ideal position
  int32_t head;
  int32_t tile;          ///< that chain's row tile
  bool inside;           ///< the cut lies within that chain
  int32_t chain_items;   ///< the uncut chains' items before the chain
  int32_t item;          ///< ... before the one that contains or begins at the cut
  int32_t token;         ///< where in its item the cut is: a local token, or -1 at the item's begin
  WorkSums before;       ///< of the earlier workers
  int32_t tail_partial;  ///< partial rows before those of the chain that the next worker continues
};

/// Memory of one planning on the device, besides the image. In a thread block's shared memory where it fits.
struct DeviceScratch {
  int64_t* cost_before = nullptr;   ///< [row tiles + 1], cost of the row tiles before, per KV head
  DeviceCut* cuts = nullptr;        ///< [workers + 1]
  int32_t* tile_begin = nullptr;    ///< [requests + 1], row tiles before the request, per KV head
  int32_t* items_before = nullptr;  ///< [row tiles + 1], items of the row tiles before, uncut, per KV head
};

/// Divides `memory` of device_scratch_bytes bytes, aligned to 8.
FOLIO_HOST_DEVICE inline DeviceScratch carve_device_scratch(std::byte* memory, int64_t requests, int64_t row_tiles,
                                                            int64_t workers) {
  DeviceScratch scratch;
  scratch.cost_before = reinterpret_cast<int64_t*>(memory);
  scratch.cuts = reinterpret_cast<DeviceCut*>(scratch.cost_before + row_tiles + 1);
  scratch.tile_begin = reinterpret_cast<int32_t*>(scratch.cuts + workers + 1);
  scratch.items_before = scratch.tile_begin + requests + 1;
  return scratch;
}

constexpr int64_t device_scratch_bytes(int64_t requests, int64_t row_tiles, int64_t workers) {
  return (row_tiles + 1) * int64_t{sizeof(int64_t) + sizeof(int32_t)} + (workers + 1) * int64_t{sizeof(DeviceCut)} +
         (requests + 1) * int64_t{sizeof(int32_t)};
}

}  // namespace folio::inline v0::planner
