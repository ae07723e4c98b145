// The rate of AMX's bfloat16 products with all operands in tile registers.
#include <cstdint>

#include "replay/yardstick_kernels.hpp"

namespace folio::replay {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

}  // namespace

float multiply_in_tiles(int64_t iterations, double* flops) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = 16;
    config.row_bytes[tile] = 64;
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
  // Four independent sums from two left and two right factors, as a product of blocks has them. Registers begin as 0.
  for (int64_t i = 0; i < iterations; ++i) {
    __asm__ volatile(
        "tdpbf16ps %tmm6, %tmm4, %tmm0\n tdpbf16ps %tmm7, %tmm4, %tmm1\n"
        "tdpbf16ps %tmm6, %tmm5, %tmm2\n tdpbf16ps %tmm7, %tmm5, %tmm3\n"
        "tdpbf16ps %tmm6, %tmm4, %tmm0\n tdpbf16ps %tmm7, %tmm4, %tmm1\n"
        "tdpbf16ps %tmm6, %tmm5, %tmm2\n tdpbf16ps %tmm7, %tmm5, %tmm3\n");
  }
  alignas(64) float sum[16][16];
  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)\n tilerelease" ::"r"(sum), "r"(int64_t{64}) : "memory");
  *flops = 8.0 * 2.0 * 16 * 16 * 32 * static_cast<double>(iterations);
  return sum[0][0];
}

}  // namespace folio::replay
