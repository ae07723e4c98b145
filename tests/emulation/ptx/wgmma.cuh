#pragma once

#include <stdexcept>

#include "ptx/mma.cuh"

/// src/ptx/wgmma.cuh, emulated: a product is computed when it is begun.
namespace folio::inline v0::ptx {

inline uint64_t describe_tile(uint32_t shared, uint32_t columns, uint32_t groups) {
  if (shared % 1024 != 0) throw std::runtime_error("a tile of a product begins at no multiple of 1024");
  return shared | uint64_t{columns} << 20 | uint64_t{groups} << 40;
}
inline uint64_t advance(uint64_t tile, uint32_t bytes) {
  return tile + bytes;
}
inline void begin_products() {
  __syncwarp();
}
inline void end_group() {}
inline void order_before_products() {}
template <int32_t Pending, int32_t Count>
void wait_products(float (&)[Count]) {
  __syncwarp();
}
enum class Sum : int32_t { kNew = 0, kAdd = 1 };

/// Element `column` of row `row` of a tile; transposed: of row `column`, in steps of 64 columns.
template <typename T>
float tile_element(uint64_t tile, int32_t row, int32_t column, bool transposed) {
  const auto begin = static_cast<uint32_t>(tile & 0xfffff);
  const auto columns = static_cast<uint32_t>(tile >> 20 & 0xfffff);
  const auto groups = static_cast<uint32_t>(tile >> 40);
  const auto r = static_cast<uint32_t>(transposed ? column : row);
  const auto c = static_cast<uint32_t>(transposed ? row : column);
  const uint32_t linear =
      begin + r / 8 * groups + r % 8 * 128 + (transposed ? c / 64 * columns + c % 64 * 2 : c * 2);
  uint16_t bits;
  std::memcpy(&bits, emulation::shared_memory() + (linear ^ (linear >> 7 & 7) << 4), 2);
  return widened<T>(bits);
}

template <typename T, Sum kSum, int32_t Count>
void multiply_tiles(float (&d)[Count], uint64_t a, uint64_t b) {
  const int32_t lane = emulation::thread_index().x % 32;
  const int32_t first = emulation::thread_index().x % 128 / 32 * 16 + lane / 4;
  float rows[2][16];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 16; ++k) rows[h][k] = tile_element<T>(a, first + 8 * h, k, false);
  }
  for (int32_t i = 0; i < Count; ++i) {
    double sum = 0.0;
    for (int32_t k = 0; k < 16; ++k) {
      sum += static_cast<double>(rows[i / 2 % 2][k]) *
             tile_element<T>(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k, false);
    }
    d[i] = static_cast<float>((kSum == Sum::kAdd ? d[i] : 0.0f) + sum);
  }
  __syncwarp();
}

template <typename T, int32_t Count>
void multiply_rows(float (&d)[Count], const uint32_t (&a)[4], uint64_t b) {
  const auto* lanes = emulation::exchange({a[0], a[1], a[2], a[3]});
  const int32_t lane = emulation::thread_index().x % 32;
  float rows[2][16];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 16; ++k) {
      rows[h][k] = widened<T>(half_word(lanes[lane / 4 * 4 + k % 8 / 2][h + k / 8 * 2], k % 2));
    }
  }
  for (int32_t i = 0; i < Count; ++i) {
    double sum = 0.0;
    for (int32_t k = 0; k < 16; ++k) {
      sum += static_cast<double>(rows[i / 2 % 2][k]) * tile_element<T>(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k, true);
    }
    d[i] = static_cast<float>(d[i] + sum);
  }
  __syncwarp();
}

}  // namespace folio::inline v0::ptx
