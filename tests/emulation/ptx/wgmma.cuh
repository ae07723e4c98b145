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

/// B of the MMA that a warp is at, decoded: each lane decodes its share, and all meet before one multiplies. Element
/// (n, k) is at [n / 8][k][n % 8], where the two columns of a lane lie side by side.
using ColumnPair = double __attribute__((vector_size(16)));
constexpr int32_t kMostWarps = 32;
constexpr int32_t kMostElements = 256 * 32;
inline double* decoded_b() {
  alignas(ColumnPair) static double of_warps[kMostWarps][kMostElements];
  return of_warps[emulation::thread_index().x / 32];
}
template <int32_t Columns, int32_t Depth, typename Element>
void decode_b(const Element& element) {
  static_assert(Columns * Depth <= kMostElements);
  double* const b = decoded_b();
  for (int32_t i = emulation::lane(); i < Columns * Depth; i += 32) {
    const int32_t n = i / Depth, k = i % Depth;
    b[(n / 8 * Depth + k) * 8 + n % 8] = element(n, k);
  }
}

/// A lane's accumulators, of two rows of A with B. The sums keep all bits. The warp's lanes meet before, and
/// afterwards.
template <bool kAdds, int32_t Depth, int32_t Count>
void mma_lane(float (&d)[Count], const double (&rows)[2][Depth]) {
  const double* b = decoded_b() + emulation::lane() % 4 * 2;
  for (int32_t j = 0; j < Count / 4; ++j) {  // columns 8j + 2 (lane % 4) and the next
    ColumnPair sums[2] = {};
    for (int32_t k = 0; k < Depth; ++k, b += 8) {
      const auto columns = *reinterpret_cast<const ColumnPair*>(b);
      sums[0] += rows[0][k] * columns;
      sums[1] += rows[1][k] * columns;
    }
    for (int32_t h = 0; h < 2; ++h) {
      for (int32_t n = 0; n < 2; ++n) {
        float& to = d[j * 4 + 2 * h + n];
        to = static_cast<float>((kAdds ? to : 0.0f) + sums[h][n]);
      }
    }
  }
  __syncwarp();
}
/// The first of a lane's two rows of A; the other is 8 rows below.
inline int32_t first_row() {
  return emulation::thread_index().x % 128 / 32 * 16 + emulation::thread_index().x % 32 / 4;
}

template <typename T, ScaleOut kScaleOut, int32_t Count>
void wgmma_ss(float (&d)[Count], uint64_t a, uint64_t b) {
  double rows[2][16];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 16; ++k) rows[h][k] = element_at<T>(element_address(a, first_row() + 8 * h, k));
  }
  decode_b<2 * Count, 16>([b](int32_t n, int32_t k) { return element_at<T>(element_address(b, n, k)); });
  __syncwarp();
  mma_lane<kScaleOut == ScaleOut::kOne>(d, rows);
}

template <typename T, int32_t Count>
void wgmma_ss_transposed_a(float (&d)[Count], uint64_t a, uint64_t b) {
  double rows[2][16];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 16; ++k) rows[h][k] = element_at<T>(element_address(a, k, first_row() + 8 * h));
  }
  decode_b<2 * Count, 16>([b](int32_t n, int32_t k) { return element_at<T>(element_address(b, n, k)); });
  __syncwarp();
  mma_lane<true>(d, rows);
}

template <typename T, int32_t Count>
void wgmma_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b) {
  decode_b<2 * Count, 16>([b](int32_t n, int32_t k) { return element_at<T>(element_address(b, k, n)); });
  const auto* lanes = emulation::exchange({a[0], a[1], a[2], a[3]});
  const int32_t lane = emulation::lane();
  double rows[2][16];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 16; ++k) {
      rows[h][k] = upcast<T>(half_word(lanes[lane / 4 * 4 + k % 8 / 2][h + k / 8 * 2], k % 2));
    }
  }
  mma_lane<true>(d, rows);
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

template <ScaleOut kScaleOut>
void wgmma_fp8_ss(float (&d)[64], uint64_t a, uint64_t b) {
  double rows[2][32];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 32; ++k) rows[h][k] = fp8_at(a, first_row() + 8 * h, k);
  }
  decode_b<128, 32>([b](int32_t n, int32_t k) { return fp8_at(b, n, k); });
  __syncwarp();
  mma_lane<kScaleOut == ScaleOut::kOne>(d, rows);
}

template <ScaleOut kScaleOut, int32_t Count>
void wgmma_fp8_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b) {
  decode_b<2 * Count, 32>([b](int32_t n, int32_t k) { return fp8_at(b, n, k); });
  const auto* lanes = emulation::exchange({a[0], a[1], a[2], a[3]});
  const int32_t lane = emulation::lane();
  double rows[2][32];
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t k = 0; k < 32; ++k) {
      rows[h][k] = upcast_e4m3(lanes[lane / 4 * 4 + k % 16 / 4][h + k / 16 * 2] >> k % 4 * 8 & 0xff);
    }
  }
  mma_lane<kScaleOut == ScaleOut::kOne>(d, rows);
}

}  // namespace folio::inline v0::ptx
