#pragma once

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/attention/item_call.hpp"

namespace folio::inline v0::kernels::cpu {

/// Where the item's keys lie and which of them are its own.
ItemKeys bind_keys(const AttentionParams& params, const scheduler::WorkTile& item);

/// rows[i] = packed row item.row_begin + i against the item's segment. An item without keys gives rows without scales
/// and sight: only their queries.
void bind_rows(const AttentionParams& params, const scheduler::WorkTile& item, ItemRow* rows);

}  // namespace folio::inline v0::kernels::cpu
