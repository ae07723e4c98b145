#pragma once

#include <cstdint>
#include <span>

/// What all functions on trees ask of their arrays.
namespace folio::inline v0::backends::token_pool {

/// The number of requests behind an array of nodes. Throws kInvalidArgument unless draft_token_num >= 1 divides it.
int64_t requests_of(const char* name, int64_t size, int32_t draft_token_num);

/// Throws kInvalidArgument, naming the request and the node, unless every root has parent -1 and every other node one
/// that comes before it. Returns the number of requests.
int64_t check_parents(std::span<const int32_t> parents, int32_t draft_token_num);

}  // namespace folio::inline v0::backends::token_pool
