#pragma once

#include <string>

#include "array.hpp"

namespace folio::python {

/// BlockScaleArgs, with its array: one dimension of bytes.
struct BlockScale {
  Array array;
  int64_t first_row = 0;
};

/// The factors of `packed`, [tokens, heads, head_dim / 2] bytes of 4-bit values, under the argument's name. Throws
/// Error(kInvalidArgument) where there are fewer than its rows take.
BlockScale block_scale_of(const BlockScale& given, const TensorView& packed, const std::string& name, Access access);

}  // namespace folio::python
