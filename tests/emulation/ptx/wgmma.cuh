#pragma once

#include <cuda_fp8.h>

#include <stdexcept>

#include "ptx/barrier.cuh"
#include "ptx/mma.cuh"

/// src/ptx/wgmma.cuh, emulated: an MMA is computed when it is issued.
namespace folio::inline v0::ptx {

template <int32_t Span>
uint64_t make_smem_desc(uint32_t shared, uint32_t columns, uint32_t groups) {
  if (shared % 1024 != 0) throw std::runtime_error("an MMA tile begins at no multiple of 1024");
  return shared | uint64_t{columns} << 20 | uint64_t{groups} << 40 | uint64_t{Span == 128} << 60;
}
inline uint32_t address_of_desc(uint64_t tile) {
  return static_cast<uint32_t>(tile & 0xfffff);
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
template <int32_t Pending>
void wgmma_wait() {
  __syncwarp();
}
template <int32_t Count>
void warpgroup_fence_operand(float (&)[Count]) {}
inline void order_wait_after(float, uint32_t) {}
enum class ScaleOut : int32_t { kZero = 0, kOne = 1 };

/// Address of a tile's element (row, column), as its descriptor says: see make_smem_desc.
inline uint32_t element_address(uint64_t tile, int32_t row, int32_t column) {
  const uint32_t begin = address_of_desc(tile);
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
  return upcast<T>(bits);
}

/// A lane's accumulators of two rows of 16 columns with B, whose element (n, k) is `column(n, k)`.
template <bool kAdds, int32_t Count, typename Column>
void mma_lane(float (&d)[Count], const float (&rows)[2][16], const Column& column) {
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
  mma_lane<kScaleOut == ScaleOut::kOne>(d, rows,
                                        [b](int32_t n, int32_t k) { return element_at<T>(element_address(b, n, k)); });
  __syncwarp();
}

template <typename T, int32_t Count>
void wgmma_ss_transposed_a(float (&d)[Count], uint64_t a, uint64_t b) {
  const int32_t first = emulation::thread_index().x % 128 / 32 * 16 + emulation::thread_index().x % 32 / 4;
  float rows[2][16];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 16; ++k) rows[h][k] = element_at<T>(element_address(a, k, first + 8 * h));
  }
  mma_lane<true>(d, rows, [b](int32_t n, int32_t k) { return element_at<T>(element_address(b, n, k)); });
  __syncwarp();
}

template <typename T, int32_t Count>
void wgmma_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b) {
  const auto* lanes = emulation::exchange({a[0], a[1], a[2], a[3]});
  const int32_t lane = emulation::thread_index().x % 32;
  float rows[2][16];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 16; ++k) {
      rows[h][k] = upcast<T>(half_word(lanes[lane / 4 * 4 + k % 8 / 2][h + k / 8 * 2], k % 2));
    }
  }
  mma_lane<true>(d, rows, [b](int32_t n, int32_t k) { return element_at<T>(element_address(b, k, n)); });
  __syncwarp();
}

inline float upcast_e4m3(uint32_t bits) {
  return upcast<__half>(static_cast<uint16_t>(upcast_pair(bits, __NV_E4M3)));
}
/// Element `column` of row `row` of a tile whose rows are 128 bytes: see make_smem_desc.
inline float fp8_at(uint64_t tile, int32_t row, int32_t column) {
  const uint32_t begin = address_of_desc(tile);
  const auto groups = static_cast<uint32_t>(tile >> 40 & 0xfffff);
  const auto r = static_cast<uint32_t>(row);
  if (tile >> 60 == 0) throw std::runtime_error("an fp8 tile has spans of 64 bytes");
  const uint32_t linear = begin + r / 8 * groups + r % 8 * 128 + static_cast<uint32_t>(column);
  return upcast_e4m3(emulation::shared_memory()[linear ^ (linear >> 7 & 7) << 4]);
}

/// A lane's accumulators of two rows of 32 columns with a tile's rows: they keep all bits.
template <bool kAdds, int32_t Count>
void mma_lane_fp8(float (&d)[Count], const float (&rows)[2][32], uint64_t b) {
  for (int32_t n = 0; n < Count / 2; ++n) {
    const int32_t number = n / 2 * 8 + emulation::thread_index().x % 4 * 2 + n % 2;
    double sums[2] = {};
    for (int32_t k = 0; k < 32; ++k) {
      const auto x = static_cast<double>(fp8_at(b, number, k));
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
    for (int32_t k = 0; k < 32; ++k) rows[h][k] = fp8_at(a, first + 8 * h, k);
  }
  mma_lane_fp8<kScaleOut == ScaleOut::kOne>(d, rows, b);
}

template <ScaleOut kScaleOut, int32_t Count>
void wgmma_fp8_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b) {
  const auto* lanes = emulation::exchange({a[0], a[1], a[2], a[3]});
  const int32_t lane = emulation::thread_index().x % 32;
  float rows[2][32];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 32; ++k) {
      rows[h][k] = upcast_e4m3(lanes[lane / 4 * 4 + k % 16 / 4][h + k / 16 * 2] >> k % 4 * 8 & 0xff);
    }
  }
  mma_lane_fp8<kScaleOut == ScaleOut::kOne>(d, rows, b);
}

}  // namespace folio::inline v0::ptx
