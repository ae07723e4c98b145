#pragma once

#include <cstddef>
#include <cstdint>

/// The yardsticks' inner loops, compiled once per instruction set: each into its own namespace, so that no copy made
/// for a newer CPU is ever called on an older one. Nothing but these two declarations may be shared between the copies.
namespace folio::replay {

struct YardstickKernels {
  const char* isa;
  /// Reads `count` pages, `streams` (1, 4 or 8) in step; the result depends on every byte.
  uint64_t (*read_pages)(const std::byte* const* pages, size_t count, size_t page_bytes, int32_t streams);
  /// Runs `iterations` rounds of multiply-adds in registers; *flops is what they came to. The result depends on them.
  float (*multiply)(int64_t iterations, double* flops);
};

/// As YardstickKernels::multiply, for bfloat16 products in AMX's tile registers; only where the OS has granted them.
float multiply_in_tiles(int64_t iterations, double* flops);

/// Likewise in AVX-512's registers, two products a lane; only where the CPU has AVX512_BF16.
float multiply_pairs(int64_t iterations, double* flops);

namespace yardstick_baseline {
extern const YardstickKernels kKernels;
}
namespace yardstick_v3 {
extern const YardstickKernels kKernels;
}
namespace yardstick_v4 {
extern const YardstickKernels kKernels;
}

}  // namespace folio::replay
