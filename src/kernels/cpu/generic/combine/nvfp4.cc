#include "kernels/cpu/generic/combine/row_convert.hpp"

#include <cmath>

#include "folio/types/float_convert.hpp"
#include "folio/types/nvfp4.hpp"

namespace folio::inline v0::kernels::generic {
namespace {

constexpr float kLargestE2m1 = 6.0f;

/// The largest magnitude; NaN if any value is.
float largest_magnitude(const float* values) noexcept {
  float largest = 0.0f;
  for (int32_t i = 0; i < kNvfp4BlockSize; ++i) {
    const float magnitude = std::abs(values[i]);
    if (magnitude > largest || std::isnan(magnitude)) largest = magnitude;  // nothing is greater than a NaN: it stays
  }
  return largest;
}

}  // namespace

void store_nvfp4(const float* values, float global_scale, int32_t n, uint8_t* data, const Nvfp4Place& place) noexcept {
  for (int32_t block = 0; block < n / kNvfp4BlockSize; ++block) {
    const float* const x = values + block * kNvfp4BlockSize;
    uint8_t* const codes = data + block * (kNvfp4BlockSize / 2);
    const uint8_t stored = float_to_fp8_e4m3(global_scale * largest_magnitude(x) / kLargestE2m1);
    place.scales[nvfp4_scale_index(place.row, place.first_block + block, place.blocks_per_row)] = stored;
    const float scale = fp8_e4m3_to_float(stored);
    for (int32_t i = 0; i < kNvfp4BlockSize; i += 2) {
      uint8_t pair = 0;
      if (scale != 0.0f) {
        const uint8_t low = float_to_fp4_e2m1(x[i] * global_scale / scale);
        const uint8_t high = float_to_fp4_e2m1(x[i + 1] * global_scale / scale);
        pair = static_cast<uint8_t>(low | (high << 4));
      }
      codes[i / 2] = pair;
    }
  }
}

void load_nvfp4(const uint8_t* data, float global_scale, int32_t n, const Nvfp4Place& place, float* values) noexcept {
  for (int32_t i = 0; i < n; ++i) {
    const int64_t block = place.first_block + i / kNvfp4BlockSize;
    const float scale = fp8_e4m3_to_float(place.scales[nvfp4_scale_index(place.row, block, place.blocks_per_row)]);
    values[i] = load_fp4_as_float(data, i) * scale / global_scale;
  }
}

}  // namespace folio::inline v0::kernels::generic
