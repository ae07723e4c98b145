#pragma once

#include "ptx/wgmma.cuh"

/// Products of fp8 codes (e4m3) by a warpgroup, as they are (compute capability 9.0 alone): PTX `wgmma` of kind e4m3,
/// and what brings its operands into place. Both operands lie along the sum: a tile of keys as it is, values
/// transposed. Sums keep 13 bits below the largest product of 32, or below what they are added to: docs/decisions.
namespace folio::inline v0::ptx {

/// One step of 32 of a product of 64 rows and 128 columns: d (+)= A B^T, both tiles row by row in shared memory.
template <ScaleOut kScaleOut>
__device__ __forceinline__ void wgmma_fp8_ss(float (&d)[64], uint64_t a, uint64_t b);

/// The same with A's 32 columns in registers: with g = lane / 4 and t = lane % 4, a word has a row's columns 4t to 4t +
/// 3, words are rows g, g + 8, then the same 16 columns further on. Of 64 (32 sums) or 128 columns.
template <ScaleOut kScaleOut, int32_t Count>
__device__ __forceinline__ void wgmma_fp8_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b);

// Registers and constraints of so many accumulators, by eights.
#define FOLIO_EIGHT_ACCUMULATORS(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FOLIO_ACCUMULATORS_32 \
  FOLIO_EIGHT_ACCUMULATORS(0), FOLIO_EIGHT_ACCUMULATORS(8), FOLIO_EIGHT_ACCUMULATORS(16), FOLIO_EIGHT_ACCUMULATORS(24)
#define FOLIO_ACCUMULATORS_64                                                                                      \
  FOLIO_ACCUMULATORS_32, FOLIO_EIGHT_ACCUMULATORS(32), FOLIO_EIGHT_ACCUMULATORS(40), FOLIO_EIGHT_ACCUMULATORS(48), \
      FOLIO_EIGHT_ACCUMULATORS(56)
#define FOLIO_REGISTERS_32                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FOLIO_REGISTERS_64                                                                            \
  FOLIO_REGISTERS_32                                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define FOLIO_WGMMA_FP8_SS(sum, adds)                                                              \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma_fp8_ss<sum>(float(&d)[64], uint64_t a, uint64_t b) {       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " adds                                             \
                 ", 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" FOLIO_REGISTERS_64 \
                 "}, %64, %65, p, "                                                                \
                 "1, 1;}"                                                                          \
                 : FOLIO_ACCUMULATORS_64                                                           \
                 : "l"(a), "l"(b));                                                                \
  }
FOLIO_WGMMA_FP8_SS(ScaleOut::kZero, "0")
FOLIO_WGMMA_FP8_SS(ScaleOut::kOne, "1")
#undef FOLIO_WGMMA_FP8_SS

#define FOLIO_WGMMA_FP8_RS(sum, adds, count, columns, i0, i1, i2, i3, i4)                                         \
  template <>                                                                                                     \
  __device__ __forceinline__ void wgmma_fp8_rs<sum, count>(float(&d)[count], const uint32_t(&a)[4], uint64_t b) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " adds ", 0; wgmma.mma_async.sync.aligned.m64n" columns           \
                 "k32.f32.e4m3.e4m3 {" FOLIO_REGISTERS_##count "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4         \
                                                               ", p, 1, "                                         \
                                                               "1;}"                                              \
                 : FOLIO_ACCUMULATORS_##count                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                           \
  }
FOLIO_WGMMA_FP8_RS(ScaleOut::kZero, "0", 32, "64", "%32", "%33", "%34", "%35", "%36")
FOLIO_WGMMA_FP8_RS(ScaleOut::kOne, "1", 32, "64", "%32", "%33", "%34", "%35", "%36")
FOLIO_WGMMA_FP8_RS(ScaleOut::kZero, "0", 64, "128", "%64", "%65", "%66", "%67", "%68")
FOLIO_WGMMA_FP8_RS(ScaleOut::kOne, "1", 64, "128", "%64", "%65", "%66", "%67", "%68")
#undef FOLIO_WGMMA_FP8_RS
#undef FOLIO_REGISTERS_64
#undef FOLIO_REGISTERS_32
#undef FOLIO_ACCUMULATORS_64
#undef FOLIO_ACCUMULATORS_32
#undef FOLIO_EIGHT_ACCUMULATORS

/// Four numbers as e4m3 codes, the first in the lowest byte; rounded to nearest, saturated, NaN stays NaN.
__device__ __forceinline__ uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
      "mov.b32 %0, {low, high};}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

}  // namespace folio::inline v0::ptx
