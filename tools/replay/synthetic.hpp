#pragma once

#include <cstdint>

#include "folio/types/dtype.hpp"

namespace folio::replay {

/// Which of a layer's inputs a row is; part of the row's key.
enum class InputKind : uint64_t { kKey = 1, kValue = 2, kQuery = 3 };

/// The key of one head's row of keys or values: a pure function of the seed and of all tokens up to this one (`link`,
/// the token chain's value here), so that equal prefixes have equal KV whoever computes it and when.
uint64_t kv_row_key(uint64_t seed, InputKind kind, uint64_t link, int32_t layer, int32_t head);

/// The key of one head's query row: a pure function of the seed, the request and the position.
uint64_t query_row_key(uint64_t seed, int32_t request, int32_t position, int32_t layer, int32_t head);

/// Fills `dim` (a multiple of 8) elements of `dtype` at `row` with values that `row_key` determines: (2 b + 1) / 128
/// for b uniform in [-128, 127], so within (-2, 2), of mean 0 and variance 4/3. Exact in float32, float16 and bfloat16;
/// rounded in the fp8 types.
void fill_row(uint64_t row_key, DType dtype, int32_t dim, void* row);

/// The same values as floats after a cache of dtype `stored` and this scale: rounded to it where it is an fp8 type, as
/// they are otherwise.
void fill_row_as_stored(uint64_t row_key, DType stored, float scale, int32_t dim, float* row);

}  // namespace folio::replay
