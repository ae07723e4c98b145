#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <memory>
#include <stdexcept>

#include "ptx/math.cuh"
#include "warp_emulator.hpp"

/// src/ptx/mma.cuh, emulated.
namespace folio::inline v0::ptx {

inline uint16_t half_word(uint32_t word, int32_t index) {
  return static_cast<uint16_t>(word >> 16 * index);
}
/// Element (row, column) of matrix `i` whose rows' addresses the lanes gave.
inline uint16_t matrix_element(const uint32_t (*lanes)[8], int32_t i, int32_t row, int32_t column) {
  const uint32_t address = lanes[8 * i + row][0];
  if (address % 16 != 0) throw std::runtime_error("a matrix row is not aligned");
  uint16_t bits;
  std::memcpy(&bits, emulation::shared_memory() + address + 2 * column, 2);
  return bits;
}
inline void ldmatrix_x4(uint32_t (&out)[4], uint32_t shared) {
  const auto* lanes = emulation::exchange({shared});
  const int32_t lane = emulation::thread_index().x % 32;
  for (int32_t i = 0; i < 4; ++i) {
    out[i] = matrix_element(lanes, i, lane / 4, lane % 4 * 2) |
             uint32_t{matrix_element(lanes, i, lane / 4, lane % 4 * 2 + 1)} << 16;
  }
}
inline void ldmatrix_x4_trans(uint32_t (&out)[4], uint32_t shared) {
  const auto* lanes = emulation::exchange({shared});
  const int32_t lane = emulation::thread_index().x % 32;
  for (int32_t i = 0; i < 4; ++i) {
    out[i] = matrix_element(lanes, i, lane % 4 * 2, lane / 4) |
             uint32_t{matrix_element(lanes, i, lane % 4 * 2 + 1, lane / 4)} << 16;
  }
}
inline void stmatrix_x4(uint32_t shared, const uint32_t (&in)[4]) {
  const auto* lanes = emulation::exchange({shared});
  const int32_t lane = emulation::thread_index().x % 32;
  for (int32_t i = 0; i < 4; ++i) {
    const uint32_t row = lanes[8 * i + lane / 4][0];
    if (row % 16 != 0) throw std::runtime_error("a matrix row is not aligned");
    std::memcpy(emulation::shared_memory() + row + lane % 4 * 4, &in[i], 4);
  }
  __syncwarp();
}
inline void stmatrix_x4_trans(uint32_t shared, const uint32_t (&in)[4]) {
  const auto* lanes = emulation::exchange({shared});
  const int32_t lane = emulation::thread_index().x % 32;
  for (int32_t i = 0; i < 4; ++i) {
    for (int32_t k = 0; k < 2; ++k) {
      const uint32_t row = lanes[8 * i + lane % 4 * 2 + k][0];
      if (row % 16 != 0) throw std::runtime_error("a matrix row is not aligned");
      const uint16_t bits = half_word(in[i], k);
      std::memcpy(emulation::shared_memory() + row + lane / 4 * 2, &bits, 2);
    }
  }
  __syncwarp();
}
inline uint32_t movmatrix_trans(uint32_t two) {
  const auto* lanes = emulation::exchange({two});
  const int32_t lane = emulation::thread_index().x % 32;
  const int32_t row = lane % 4 * 2;
  const int32_t column = lane / 4;
  return half_word(lanes[4 * row + column / 2][0], column % 2) |
         uint32_t{half_word(lanes[4 * (row + 1) + column / 2][0], column % 2)} << 16;
}

template <typename T>
float upcast(uint16_t bits);
template <>
inline float upcast<__nv_bfloat16>(uint16_t bits) {
  return __uint_as_float(uint32_t{bits} << 16);
}
template <>
inline float upcast<__half>(uint16_t bits) {
  static const auto all = [] {  // MMAs are what the emulator's time goes into
    auto values = std::make_unique<std::array<float, 65536>>();
    for (uint32_t i = 0; i < values->size(); ++i) (*values)[i] = upcast_f16(static_cast<uint16_t>(i));
    return values;
  }();
  return (*all)[bits];
}

template <typename T>
void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto* lanes = emulation::exchange({a[0], a[1], a[2], a[3], b0, b1});
  const int32_t lane = emulation::lane();
  double sums[4] = {};
  for (int32_t k = 0; k < 16; k += 2) {  // a word holds two elements
    const uint32_t* const of_rows = lanes[lane / 4 * 4 + k % 8 / 2] + k / 8 * 2;
    const uint32_t words[4] = {of_rows[0], of_rows[1], lanes[lane % 4 * 8 + k % 8 / 2][4 + k / 8],
                               lanes[lane % 4 * 8 + 4 + k % 8 / 2][4 + k / 8]};
    for (int32_t half = 0; half < 2; ++half) {
      double of[4];
      for (int32_t i = 0; i < 4; ++i) of[i] = upcast<T>(half_word(words[i], half));
      sums[0] += of[0] * of[2];
      sums[1] += of[0] * of[3];
      sums[2] += of[1] * of[2];
      sums[3] += of[1] * of[3];
    }
  }
  for (int32_t i = 0; i < 4; ++i) acc[i] = static_cast<float>(acc[i] + sums[i]);
}

}  // namespace folio::inline v0::ptx
