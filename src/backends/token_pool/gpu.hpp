#pragma once

#include <cstdint>

#include "backends/token_pool/device/kv_range_rule.hpp"
#include "folio/types/device.hpp"

/// What the backend asks of a GPU besides attention and memory. Implemented in cuda/; in builds without a toolkit every
/// call throws kUnavailable.
namespace folio::inline v0::backends::token_pool::gpu {

/// The lists of a wrapper, from lengths on the device: what KvLists::build does on the host.
struct ListsJob {
  KvRangeJob ranges;
  SlotTable table;
  const int32_t* rows = nullptr;             ///< [R], of the table
  const int32_t* given_kv_indptr = nullptr;  ///< lists that exist already: only lengths are taken from them
  int32_t* cu_q = nullptr;                   ///< [R + 1]
  int32_t* kv_indptr = nullptr;              ///< [R + 1]
  int32_t* kv_last_page_len = nullptr;       ///< [R]; null: not written
  int32_t* kv_lens = nullptr;                ///< [R]
  int32_t* first_pos = nullptr;              ///< [R]
  int32_t* table_starts = nullptr;           ///< [R]
  int32_t* kv_indices = nullptr;
  int64_t capacity = 0;  ///< entries of kv_indices; those beyond are not written
};
void build_lists(int32_t device, const ListsJob& job, Stream stream);

}  // namespace folio::inline v0::backends::token_pool::gpu
