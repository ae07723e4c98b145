#pragma once

#include <cstddef>

#include "folio/types/attention.hpp"
#include "kernels/cpu/common/attention/item_call.hpp"
#include "scheduler/plan_view.hpp"

namespace folio::inline v0::kernels::cpu {

/// A worker's scratch memory, carved.
struct WorkerScratch {
  ItemScratch item;
  ItemRow* rows = nullptr;  ///< [tile rows]
  RowStates running;        ///< of the accumulation
  RowStates split;          ///< of one fixed split, before it is folded into the running state
  size_t bytes = 0;         ///< of all parts
};

int32_t padded(int32_t value, int32_t to);

/// Carves `memory`; with null, only counts. The same code for both, so that they agree. `own_bytes`: what the
/// arithmetic wants for itself.
WorkerScratch carve_scratch(const AttentionConfig& config, const scheduler::TileShape& tile, std::byte* memory,
                            size_t own_bytes = 0);

/// Fills ItemCall::rope.
void set_rope(const RopeArgs& rope, int32_t head_dim, double* quarter_turns);

}  // namespace folio::inline v0::kernels::cpu
