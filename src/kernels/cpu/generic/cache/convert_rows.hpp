#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/dtype.hpp"

namespace folio::inline v0::kernels::generic {

/// Converts n contiguous elements: to(from(x) * from_scale / to_scale). A scale counts only on the side that is fp8 or
/// int8. Source and destination do not overlap and are aligned to their elements.
using ConvertFunction = void (*)(const std::byte* from, std::byte* to, int64_t n, float from_scale,
                                 float to_scale) noexcept;

/// How rows of one element type become rows of another.
struct RowConversion {
  ConvertFunction convert = nullptr;
  int32_t from_bytes = 0;  ///< of an element
  int32_t to_bytes = 0;
  /// To int8: the largest finite magnitude of from(x) * from_scale among n contiguous elements; 0 without one.
  float (*largest)(const std::byte* from, int64_t n, float from_scale) noexcept = nullptr;
};

/// The conversion between two element types of caches. `bitwise` (equal types only) copies bits and knows no scales.
/// Equal types without `bitwise` are fp8 and int8 only: they change from one scale to another.
RowConversion row_conversion(DType from, DType to, bool bitwise) noexcept;

/// Rows of KvFormat::kFp8DsMla to rows of elements: n = 576, or 512 without the RoPE part.
RowConversion ds_mla_decoding(DType to) noexcept;
/// Rows of 576 elements to such rows. A block's scale is its largest finite magnitude / 448, at least the smallest
/// normal float; values are saturated.
RowConversion ds_mla_encoding(DType from) noexcept;

/// One side of a row: its elements lie `step` (1 or 2) elements apart; 2 is one token of a packed V pair.
struct ConstRow {
  const std::byte* data;
  int32_t step;
};
struct Row {
  std::byte* data;
  int32_t step;
};

/// Converts a row of n elements.
void convert_row(const RowConversion& conversion, ConstRow from, Row to, int64_t n, float from_scale,
                 float to_scale) noexcept;

/// Converts a row to int8 with a scale of its own, which it stores: the row's largest finite magnitude / 127. Elements
/// are 0 where the scale is.
void quantize_row(const RowConversion& conversion, ConstRow from, Row to, int64_t n, float from_scale,
                  float& scale) noexcept;

/// Converts two contiguous rows into one packed pair [n][2]; as two calls of convert_row with step 2, but faster.
void convert_pair(const RowConversion& conversion, const std::byte* even, const std::byte* odd, std::byte* to,
                  int64_t n, float from_scale, float to_scale) noexcept;

}  // namespace folio::inline v0::kernels::generic
