#pragma once

#include <stdexcept>
#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"

/// src/ptx/wgmma.cuh, emulated: a product is computed when it is begun.
namespace folio::inline v0::ptx {

template <int32_t Span>
uint64_t make_smem_desc(uint32_t shared, uint32_t columns, uint32_t groups) {
  if (shared % 1024 != 0) throw std::runtime_error("a tile of a product begins at no multiple of 1024");
  return shared | uint64_t{columns} << 20 | uint64_t{groups} << 40 | uint64_t{Span == 128} << 60;
}
inline uint64_t advance_desc(uint64_t tile, uint32_t bytes) {
  return tile + bytes;
}
inline void wgmma_fence() {
  __syncwarp();
}
inline void wgmma_commit() {}
template <int32_t Pending, int32_t Count>
void wgmma_wait(float (&)[Count]) {
  __syncwarp();
}
template <int32_t Count>
void warpgroup_fence_operand(float (&)[Count]) {}
inline void order_wait_after(float, uint32_t) {}
enum class ScaleOut : int32_t { kZero = 0, kOne = 1 };

/// Where a tile's element stands, as make_smem_desc says: `row` and `column` of what lies in rows of a span.
inline uint32_t element_address(uint64_t tile, int32_t row, int32_t column) {
  const auto begin = static_cast<uint32_t>(tile & 0xfffff);
  const auto columns = static_cast<uint32_t>(tile >> 20 & 0xfffff);
  const auto groups = static_cast<uint32_t>(tile >> 40 & 0xfffff);
  const uint32_t span = tile >> 60 != 0 ? 128 : 64;
  const auto r = static_cast<uint32_t>(row);
  const auto c = static_cast<uint32_t>(column);
  const uint32_t linear = begin + r / 8 * groups + r % 8 * span + c / (span / 2) * columns + c % (span / 2) * 2;
  return linear ^ (linear >> 7 & (span / 16 - 1)) << 4;
}
template <typename T>
float element_at(uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, emulation::shared_memory() + address, 2);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(uint32_t{bits} << 16);
  } else {
    return widened<T>(bits);
  }
}

/// A lane's sums of the product of two rows' 16 components with columns whose components `column(n, k)` gives.
template <bool kAdds, int32_t Count, typename Column>
void multiply_lane(float (&d)[Count], const float (&rows)[2][16], const Column& column) {
  for (int32_t n = 0; n < Count / 2; ++n) {  // 8j + 2t + n % 2
    double sums[2] = {};
    const int32_t number = n / 2 * 8 + emulation::thread_index().x % 4 * 2 + n % 2;
    for (int32_t k = 0; k < 16; ++k) {
      const auto b = static_cast<double>(column(number, k));
      sums[0] += rows[0][k] * b;
      sums[1] += rows[1][k] * b;
    }
    for (int32_t h = 0; h < 2; ++h) {
      float& to = d[n / 2 * 4 + 2 * h + n % 2];
      to = static_cast<float>((kAdds ? to : 0.0f) + sums[h]);
    }
  }
}

template <typename T, ScaleOut kScaleOut, int32_t Count>
void wgmma_ss(float (&d)[Count], uint64_t a, uint64_t b) {
  const int32_t first = emulation::thread_index().x % 128 / 32 * 16 + emulation::thread_index().x % 32 / 4;
  float rows[2][16];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 16; ++k) rows[h][k] = element_at<T>(element_address(a, first + 8 * h, k));
  }
  multiply_lane<kScaleOut == ScaleOut::kOne>(
      d, rows, [b](int32_t n, int32_t k) { return element_at<T>(element_address(b, n, k)); });
  __syncwarp();
}

template <typename T, int32_t Count>
void wgmma_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b) {
  const auto* lanes = emulation::exchange({a[0], a[1], a[2], a[3]});
  const int32_t lane = emulation::thread_index().x % 32;
  float rows[2][16];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 16; ++k) {
      rows[h][k] = widened<T>(half_word(lanes[lane / 4 * 4 + k % 8 / 2][h + k / 8 * 2], k % 2));
    }
  }
  multiply_lane<true>(d, rows, [b](int32_t n, int32_t k) { return element_at<T>(element_address(b, k, n)); });
  __syncwarp();
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

}  // namespace folio::inline v0::ptx
