#pragma once

#include <cstdint>

namespace folio::inline v0::kernels::generic {

/// Where a piece of an NVFP4 matrix's row has its scale factors (folio/types/nvfp4.hpp).
struct Nvfp4Place {
  uint8_t* scales = nullptr;  ///< of the whole matrix
  int64_t row = 0;
  int64_t first_block = 0;  ///< of the piece, within the row
  int64_t blocks_per_row = 0;
};

/// Quantises n values (a multiple of 16): per block the scale factor sf = e4m3(global_scale * max|x| / 6), and every
/// value e2m1(x * global_scale / sf), 0 where sf is 0; value 2i in the low nibble of byte i. A NaN makes its block's
/// scale NaN.
void store_nvfp4(const float* values, float global_scale, int32_t n, uint8_t* data, const Nvfp4Place& place) noexcept;

/// The inverse: values[i] = stored * sf / global_scale.
void load_nvfp4(const uint8_t* data, float global_scale, int32_t n, const Nvfp4Place& place, float* values) noexcept;

}  // namespace folio::inline v0::kernels::generic
