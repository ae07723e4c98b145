#pragma once

#include <cstdint>

/// Intel AMX's tile registers. The instructions are inline assembly with a memory clobber: the intrinsics of gcc 12
/// name no memory operand, so that the compiler deletes stores which only a tile load reads.
///
/// Everything is forced inline: an object compiled for AMX leaves no function behind that another could pick up.
namespace folio::inline v0::simd {

/// Tile configuration: the operand of LDTILECFG.
struct alignas(64) AmxTileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(AmxTileConfig) == 64);

/// Palette 1: eight tile registers TMM0 to TMM7, each of 16 rows of 64 bytes. Tile numbers are template arguments
/// because the instructions have them as immediates. Use between configure() and release(), on one thread; other
/// threads have registers of their own. The process must have been granted tile data (platform/cpu_features.hpp).
struct AmxTiles {
  static constexpr int32_t kRows = 16;
  static constexpr int32_t kRowBytes = 64;
  static constexpr int32_t kBytes = kRows * kRowBytes;

  __attribute__((always_inline)) static inline void configure() {
    AmxTileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = kRowBytes;
      config.rows[i] = kRows;
    }
    // The whole struct is the operand; with a pointer alone, its stores could be deleted.
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }

  /// TILERELEASE: a thread switch no longer saves the registers.
  __attribute__((always_inline)) static inline void release() { __asm__ volatile("tilerelease" ::: "memory"); }

  template <int kTile>
  __attribute__((always_inline)) static inline void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }

  /// TILELOADD: 16 rows of 64 bytes, `stride` bytes apart.
  template <int kTile>
  __attribute__((always_inline)) static inline void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }

  /// TILELOADDT1: the same, for lines that should not push others out of the L1.
  template <int kTile>
  __attribute__((always_inline)) static inline void load_streaming(const void* from, int64_t stride) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kTile>
  __attribute__((always_inline)) static inline void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
  }

  /// TDPBF16PS: kSum[m][n] += sum over pairs j of kLeft[m][2j] kRight[j][2n] + kLeft[m][2j + 1] kRight[j][2n + 1]:
  /// bfloat16 factors, float32 sums, round to nearest even, denormals taken as 0 and flushed to 0, no exceptions.
  template <int kSum, int kLeft, int kRight>
  __attribute__((always_inline)) static inline void multiply_add() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
};

}  // namespace folio::inline v0::simd
