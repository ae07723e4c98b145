#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

/// AmxTiles in software, for tests on machines without AMX: the same operations with the same bits. TDPBF16PS keeps two
/// float32 sums for each element, one of the pairs' first factors and one of their second, from 0 in order with fused
/// multiply-adds, adds the two and then adds that to the destination; at each step denormals are taken as 0 and flushed
/// to 0 (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS). The names are in an
/// unnamed namespace because several objects are compiled for different instruction sets.
namespace folio::inline v0::simd {
namespace {

class EmulatedTiles {
 public:
  static constexpr int32_t kRows = 16;
  static constexpr int32_t kRowBytes = 64;
  static constexpr int32_t kBytes = kRows * kRowBytes;

  static void configure() {}
  static void release() {
    for (Tile& tile : tiles()) std::memset(tile.bytes, 0xff, kBytes);  // what is read without a load shows
  }
  template <int kTile>
  static void zero() {
    std::memset(tiles()[kTile].bytes, 0, kBytes);
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    for (int row = 0; row < kRows; ++row) {
      std::memcpy(tiles()[kTile].bytes[row], static_cast<const unsigned char*>(from) + row * stride, kRowBytes);
    }
  }
  template <int kTile>
  static void load_streaming(const void* from, int64_t stride) {
    load<kTile>(from, stride);
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    for (int row = 0; row < kRows; ++row) {
      std::memcpy(static_cast<unsigned char*>(to) + row * stride, tiles()[kTile].bytes[row], kRowBytes);
    }
  }
  template <int kSum, int kLeft, int kRight>
  static void multiply_add() {
    product(tiles()[kSum], tiles()[kLeft], tiles()[kRight]);
  }

 private:
  struct Tile {
    unsigned char bytes[kRows][kRowBytes];
  };
  static Tile (&tiles())[8] {
    static thread_local Tile all[8];
    return all;
  }

  static float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }
  /// The low or high half of a 32-bit word, as a float.
  static float half(uint32_t word, int which) {
    const uint32_t bits = which == 0 ? word << 16 : word & 0xffff0000u;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return flushed(value);
  }

  static void product(Tile& sum, const Tile& left, const Tile& right) {
    float first[16], second[16];
    uint32_t l[16], r[16][16];
    float s[16];
    std::memcpy(r, right.bytes, kBytes);
    for (int m = 0; m < 16; ++m) {
      std::memcpy(l, left.bytes[m], kRowBytes);
      std::memcpy(s, sum.bytes[m], kRowBytes);
      for (int n = 0; n < 16; ++n) first[n] = second[n] = 0.0f;
      for (int j = 0; j < 16; ++j) {
        const float a = half(l[j], 0);
        const float b = half(l[j], 1);
        for (int n = 0; n < 16; ++n) {
          first[n] = flushed(std::fma(a, half(r[j][n], 0), first[n]));
          second[n] = flushed(std::fma(b, half(r[j][n], 1), second[n]));
        }
      }
      for (int n = 0; n < 16; ++n) s[n] = flushed(flushed(s[n]) + flushed(first[n] + second[n]));
      std::memcpy(sum.bytes[m], s, kRowBytes);
    }
  }
};

}  // namespace
}  // namespace folio::inline v0::simd
