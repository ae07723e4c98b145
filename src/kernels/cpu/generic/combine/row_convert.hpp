#pragma once

#include <cstdint>

#include "folio/types/dtype.hpp"

namespace folio::inline v0::kernels::generic {

/// Rows of elements to float and back, with exactly the rounding of folio/types/float_convert.hpp, but written without
/// branches, so that the compiler vectorises the loops, and without denormal floats, so that flush-to-zero modes of the
/// calling thread change nothing.

/// out[i] = element i of `data` as float; float32, float16 and bfloat16.
void load_row(const void* data, DType dtype, int32_t n, float* out) noexcept;

/// Element i of `data` = values[i], rounded; float32, float16, bfloat16. The fp8 types store values[i] / scale,
/// saturated.
void store_row(const float* values, float scale, DType dtype, int32_t n, void* data) noexcept;

}  // namespace folio::inline v0::kernels::generic
