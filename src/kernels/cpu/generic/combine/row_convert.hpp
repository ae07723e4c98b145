#pragma once

#include <cstdint>

#include "folio/types/dtype.hpp"

/// Rows of elements to float and back, with exactly the rounding of folio/types/float_convert.hpp. Written without
/// branches, so that the compiler vectorizes the loops, and without denormal floats, so that flush-to-zero modes of the
/// calling thread change nothing. NVFP4 rows are quantized in blocks (nvfp4.cc).
namespace folio::inline v0::kernels::generic {

/// out[i] = element i of `data` as float; float32, float16 and bfloat16.
void load_row(const void* data, DType dtype, int32_t n, float* out) noexcept;

/// Element i of `data` = values[i], rounded; float32, float16, bfloat16. The fp8 types store values[i] / scale,
/// saturated.
void store_row(const float* values, float scale, DType dtype, int32_t n, void* data) noexcept;

/// Where a part of an NVFP4 matrix's row has its scale factors (folio/types/nvfp4.hpp).
struct Nvfp4Place {
  uint8_t* scales = nullptr;  ///< of the whole matrix
  int64_t row = 0;
  int64_t first_block = 0;  ///< of the part, within the row
  int64_t blocks_per_row = 0;
};

/// Quantizes n values (a multiple of 16): per block the scale factor sf = e4m3(global_scale * max|x| / 6), and every
/// value e2m1(x * global_scale / sf), 0 where sf is 0; value 2i in the low nibble of byte i. A NaN makes its block's
/// scale NaN.
void store_nvfp4(const float* values, float global_scale, int32_t n, uint8_t* data, const Nvfp4Place& place) noexcept;

/// The inverse: values[i] = stored * sf / global_scale.
void load_nvfp4(const uint8_t* data, float global_scale, int32_t n, const Nvfp4Place& place, float* values) noexcept;

}  // namespace folio::inline v0::kernels::generic
