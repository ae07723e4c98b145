#pragma once

#include "folio/types/dtype.hpp"

/// The element type of MMAs.
namespace folio::inline v0::kernels::cuda {

constexpr bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

/// The 16-bit type of the MMA: that of the inputs, or bfloat16 where all are fp8, which is dequantized. kUnset where
/// the inputs have two 16-bit types, or another type.
constexpr DType compute_type(DType q, DType kv, DType ragged_kv) {
  DType type = DType::kUnset;
  for (const DType input : {q, kv, ragged_kv}) {
    if (is_fp8(input)) continue;
    if (!is_16_bit(input) || (type != DType::kUnset && type != input)) return DType::kUnset;
    type = input;
  }
  return type == DType::kUnset ? DType::kBFloat16 : type;
}

}  // namespace folio::inline v0::kernels::cuda
