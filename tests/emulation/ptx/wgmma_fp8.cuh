#pragma once

#include <cuda_fp8.h>

#include "ptx/wgmma.cuh"

/// src/ptx/wgmma_fp8.cuh, emulated: sums keep all bits.
namespace folio::inline v0::ptx {

inline float widened_code(uint32_t code) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3);
  return __half2float(__half(half));
}
/// Element `column` of row `row` of a tile whose rows are 128 bytes: see make_smem_desc.
inline float code_at(uint64_t tile, int32_t row, int32_t column) {
  const auto begin = static_cast<uint32_t>(tile & 0xfffff);
  const auto groups = static_cast<uint32_t>(tile >> 40 & 0xfffff);
  const auto r = static_cast<uint32_t>(row);
  if (tile >> 60 == 0) throw std::runtime_error("a tile of codes has spans of 64 bytes");
  const uint32_t linear = begin + r / 8 * groups + r % 8 * 128 + static_cast<uint32_t>(column);
  return widened_code(emulation::shared_memory()[linear ^ (linear >> 7 & 7) << 4]);
}

/// A lane's sums of the product of two rows' 32 columns with a tile's rows.
template <bool kAdds, int32_t Count>
void multiply_lane_codes(float (&d)[Count], const float (&rows)[2][32], uint64_t b) {
  for (int32_t n = 0; n < Count / 2; ++n) {
    const int32_t number = n / 2 * 8 + emulation::thread_index().x % 4 * 2 + n % 2;
    double sums[2] = {};
    for (int32_t k = 0; k < 32; ++k) {
      const auto x = static_cast<double>(code_at(b, number, k));
      sums[0] += rows[0][k] * x;
      sums[1] += rows[1][k] * x;
    }
    for (int32_t h = 0; h < 2; ++h) {
      float& to = d[n / 2 * 4 + 2 * h + n % 2];
      to = static_cast<float>((kAdds ? to : 0.0f) + sums[h]);
    }
  }
  __syncwarp();
}

template <ScaleOut kScaleOut>
void wgmma_fp8_ss(float (&d)[64], uint64_t a, uint64_t b) {
  const int32_t first = emulation::thread_index().x % 128 / 32 * 16 + emulation::thread_index().x % 32 / 4;
  float rows[2][32];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 32; ++k) rows[h][k] = code_at(a, first + 8 * h, k);
  }
  multiply_lane_codes<kScaleOut == ScaleOut::kOne>(d, rows, b);
}

template <ScaleOut kScaleOut, int32_t Count>
void wgmma_fp8_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b) {
  const auto* lanes = emulation::exchange({a[0], a[1], a[2], a[3]});
  const int32_t lane = emulation::thread_index().x % 32;
  float rows[2][32];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 32; ++k) {
      rows[h][k] = widened_code(lanes[lane / 4 * 4 + k % 16 / 4][h + k / 16 * 2] >> k % 4 * 8 & 0xff);
    }
  }
  multiply_lane_codes<kScaleOut == ScaleOut::kOne>(d, rows, b);
}

inline uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  uint32_t packed = 0;
  int32_t at = 0;
  for (const float x : {a, b, c, d}) {
    packed |= uint32_t{__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)} << 8 * at++;
  }
  return packed;
}

}  // namespace folio::inline v0::ptx
