#pragma once

#include <cstdint>

/// What a device tells the host about the arrays that it was given.
namespace folio::inline v0::backends::token_pool {

/// What is wrong with a request.
enum class KvRangeFault : int32_t {
  kNone = 0,
  kRow,          ///< not a row of the table
  kLength,       ///< negative
  kStart,        ///< negative
  kAlignment,    ///< the start is not that of a page
  kEnd,          ///< beyond the row
  kOffset,       ///< indptr is not as lengths say
  kCapacity,     ///< beyond the output
  kSlot,         ///< a slot outside the pool
  kPage,         ///< slots that are not a page
  kHostLengths,  ///< the host's copy of a length is another
  kSum,          ///< lengths do not add up to what was given
  kWriteStart,   ///< of slots written to a row: negative
  kWriteEnd,     ///< of slots written to a row: beyond it
  kWriteSlots,   ///< fewer slots are given than lengths say
  kWriteSlot,    ///< a slot that 32 bits do not hold
  kScore,        ///< a candidate's score is a NaN
  kCandidate,    ///< a selected candidate that the draft does not have
  kOrder,        ///< selected candidates do not ascend
  kLostParent,   ///< a candidate is selected, its parent is not
  kRoot,         ///< a tree's first node has a parent
  kParent,       ///< a node's parent does not come before it
  kMaskBytes,    ///< beyond the mask
};

/// The first fault that a device has found since the host last looked, in memory that both reach.
struct ListReport {
  int32_t claimed = 0;                       ///< by the thread that writes
  KvRangeFault fault = KvRangeFault::kNone;  ///< written last
  int32_t request = 0;
  int32_t row = 0;    ///< of the request table; faults of trees: the node or candidate
  int64_t value = 0;  ///< what was found; faults of entries: the position
  int64_t bound = 0;  ///< what it is held against
};

}  // namespace folio::inline v0::backends::token_pool
