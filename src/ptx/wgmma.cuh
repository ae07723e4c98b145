#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/barrier.cuh"
#include "ptx/mma.cuh"

/// Warpgroup MMA (sm_90a only): PTX `wgmma`. A warpgroup is four consecutive warps, the first a multiple of 4. All four
/// issue an MMA of 64 rows. It runs asynchronously: until wgmma_wait, nobody may touch its accumulators or write its
/// operands. Warp w has rows 16w to 16w + 15. With g = lane / 4 and t = lane % 4, accumulator 4j + i of a lane is the
/// element at row g + 8 (i / 2), column 8j + 2t + i % 2.
namespace folio::inline v0::ptx {

/// Matrix descriptor of a tile in shared memory. Its rows have `Span` bytes, 128 or 64, in the swizzle mode of so many
/// bytes (as TMA writes them). Eight rows are contiguous and begin at a multiple of 1024. `groups` is the stride in
/// bytes between groups of eight rows (the stride byte offset). `columns` is used for transposed (MN-major) tiles only:
/// the stride in bytes from one span of columns to the next (the leading byte offset). advance_desc steps along a row.
template <int32_t Span>
__device__ __forceinline__ uint64_t make_smem_desc(uint32_t shared, uint32_t columns, uint32_t groups) {
  return uint64_t{(shared & 0x3ffffu) >> 4} | uint64_t{columns >> 4} << 16 | uint64_t{groups >> 4} << 32 |
         uint64_t{Span == 128 ? 1 : 2} << 62;
}

/// The address that a descriptor holds.
__device__ __forceinline__ uint32_t address_of_desc(uint64_t tile) {
  return static_cast<uint32_t>(tile & 0x3fffu) << 4;
}

/// The descriptor of what lies `bytes` further on, a multiple of 16.
__device__ __forceinline__ uint64_t advance_desc(uint64_t tile, uint32_t bytes) {
  return tile + (bytes >> 4);
}

/// Orders earlier writes of registers before the wgmma that follow and read them: accumulators and A operands.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// Commits the wgmma issued so far as one group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// CUTLASS's fence of the same name: the compiler must assume that the accumulators have changed.
template <int32_t Count>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[Count]) {
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i]));
}

/// Waits until at most the last `Pending` groups are in flight. The group that writes `d` must not be one of them.
template <int32_t Pending, int32_t Count>
__device__ __forceinline__ void wgmma_wait(float (&d)[Count]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
  warpgroup_fence_operand(d);
}

/// The same where every accumulator may still be in flight.
template <int32_t Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Keeps a later wgmma_wait behind the computation of `x`, which is never negative. ptxas hoists such a wait above all
/// arithmetic that does not use the accumulators, but not above a store. The store here, to `shared`, never executes.
__device__ __forceinline__ void order_wait_after(float x, uint32_t shared) {
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0;}" ::"f"(x), "r"(shared));
}

/// Whether an MMA overwrites the accumulators (kZero) or adds to them (kOne): D = A B + scale_out D.
enum class ScaleOut : int32_t { kZero = 0, kOne = 1 };

/// GEMM0 step, K = 16: d (+)= A B^T for 64 rows and 2 * Count columns. Both tiles are K-major in shared memory.
template <typename T, ScaleOut kScaleOut, int32_t Count>
__device__ __forceinline__ void wgmma_ss(float (&d)[Count], uint64_t a, uint64_t b);

/// GEMM1 step, K = 16: d += A B. A's 16 columns come from registers, laid out as accumulators of 16 columns packed in
/// pairs. B's 16 rows are MN-major (transposed) in shared memory.
template <typename T, int32_t Count>
__device__ __forceinline__ void wgmma_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b);

/// GEMM1 step with swapped operands, K = 16: d += A B^T. A's 64 rows are MN-major (transposed) in shared memory, B is
/// K-major.
template <typename T, int32_t Count>
__device__ __forceinline__ void wgmma_ss_transposed_a(float (&d)[Count], uint64_t a, uint64_t b);

/// FP8 GEMM0 step, K = 32, with e4m3 operands: d (+)= A B^T for 64 rows and 128 columns. Both tiles are K-major in
/// shared memory: fp8 operands cannot be transposed, so V must be stored transposed. The tensor core keeps 13 bits
/// below the largest of 32 products, or below the accumulator that they are added to.
template <ScaleOut kScaleOut>
__device__ __forceinline__ void wgmma_fp8_ss(float (&d)[64], uint64_t a, uint64_t b);

/// FP8 GEMM1 step: A's 32 columns come from registers, for 64 columns (32 accumulators) or 128. With g = lane / 4 and
/// t = lane % 4, a word holds columns 4t to 4t + 3 of one row: rows g and g + 8, then both rows 16 columns further on.
template <ScaleOut kScaleOut, int32_t Count>
__device__ __forceinline__ void wgmma_fp8_rs(float (&d)[Count], const uint32_t (&a)[4], uint64_t b);

#define FOLIO_WGMMA_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FOLIO_WGMMA_ACCUMULATORS_8 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define FOLIO_WGMMA_REGISTERS_32                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FOLIO_WGMMA_ACCUMULATORS_32                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FOLIO_WGMMA_REGISTERS_64                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOLIO_WGMMA_ACCUMULATORS_64                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define FOLIO_WGMMA_REGISTERS_48 \
  FOLIO_WGMMA_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FOLIO_WGMMA_ACCUMULATORS_48                                                                           \
  FOLIO_WGMMA_ACCUMULATORS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),  \
      "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), \
      "+f"(d[46]), "+f"(d[47])
#define FOLIO_WGMMA_REGISTERS_128                                                                                \
  FOLIO_WGMMA_REGISTERS_64                                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, "  \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "    \
  "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
  "%123, %124, %125, %126, %127"
#define FOLIO_WGMMA_ACCUMULATORS_128                                                                                  \
  FOLIO_WGMMA_ACCUMULATORS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),          \
      "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),         \
      "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]),         \
      "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]),         \
      "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]),       \
      "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), \
      "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), \
      "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), \
      "+f"(d[126]), "+f"(d[127])

#define FOLIO_WGMMA_SS(Type, type, count, columns, i0, i1)                                                           \
  template <>                                                                                                        \
  __device__ __forceinline__ void wgmma_ss<Type, ScaleOut::kZero, count>(float(&d)[count], uint64_t a, uint64_t b) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type     \
                 "." type " {" FOLIO_WGMMA_REGISTERS_##count "}, " i0 ", " i1 ", p, 1, 1, 0, 0;}"                    \
                 : FOLIO_WGMMA_ACCUMULATORS_##count                                                                  \
                 : "l"(a), "l"(b));                                                                                  \
  }                                                                                                                  \
  template <>                                                                                                        \
  __device__ __forceinline__ void wgmma_ss<Type, ScaleOut::kOne, count>(float(&d)[count], uint64_t a, uint64_t b) {  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type                                \
                 " {" FOLIO_WGMMA_REGISTERS_##count "}, " i0 ", " i1 ", 1, 1, 1, 0, 0;"                              \
                 : FOLIO_WGMMA_ACCUMULATORS_##count                                                                  \
                 : "l"(a), "l"(b));                                                                                  \
  }
#define FOLIO_WGMMA(Type, type, count, columns, i0, i1, i2, i3, i4)                                            \
  FOLIO_WGMMA_SS(Type, type, count, columns, i0, i1)                                                           \
  template <>                                                                                                  \
  __device__ __forceinline__ void wgmma_rs<Type, count>(float(&d)[count], const uint32_t(&a)[4], uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type                          \
                 " {" FOLIO_WGMMA_REGISTERS_##count "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", 1, 1, 1, 1;" \
                 : FOLIO_WGMMA_ACCUMULATORS_##count                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
  }
FOLIO_WGMMA(__nv_bfloat16, "bf16", 32, "64", "%32", "%33", "%34", "%35", "%36")
FOLIO_WGMMA(__half, "f16", 32, "64", "%32", "%33", "%34", "%35", "%36")
FOLIO_WGMMA(__nv_bfloat16, "bf16", 48, "96", "%48", "%49", "%50", "%51", "%52")
FOLIO_WGMMA(__half, "f16", 48, "96", "%48", "%49", "%50", "%51", "%52")
FOLIO_WGMMA(__nv_bfloat16, "bf16", 64, "128", "%64", "%65", "%66", "%67", "%68")
FOLIO_WGMMA(__half, "f16", 64, "128", "%64", "%65", "%66", "%67", "%68")
FOLIO_WGMMA(__nv_bfloat16, "bf16", 128, "256", "%128", "%129", "%130", "%131", "%132")
FOLIO_WGMMA(__half, "f16", 128, "256", "%128", "%129", "%130", "%131", "%132")
#undef FOLIO_WGMMA

#define FOLIO_WGMMA_SWAPPED(Type, type)                                                                   \
  FOLIO_WGMMA_SS(Type, type, 8, "16", "%8", "%9")                                                         \
  template <>                                                                                             \
  __device__ __forceinline__ void wgmma_ss_transposed_a<Type>(float(&d)[8], uint64_t a, uint64_t b) {     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {" FOLIO_WGMMA_REGISTERS_8 \
                 "}, %8, %9, 1, 1, 1, 1, 0;"                                                              \
                 : FOLIO_WGMMA_ACCUMULATORS_8                                                             \
                 : "l"(a), "l"(b));                                                                       \
  }
FOLIO_WGMMA_SWAPPED(__nv_bfloat16, "bf16")
FOLIO_WGMMA_SWAPPED(__half, "f16")
#undef FOLIO_WGMMA_SWAPPED
#undef FOLIO_WGMMA_SS

#define FOLIO_WGMMA_FP8_SS(scale_out, adds)                                                              \
  template <>                                                                                            \
  __device__ __forceinline__ void wgmma_fp8_ss<scale_out>(float(&d)[64], uint64_t a, uint64_t b) {       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " adds                                                   \
                 ", 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" FOLIO_WGMMA_REGISTERS_64 \
                 "}, %64, %65, p, "                                                                      \
                 "1, 1;}"                                                                                \
                 : FOLIO_WGMMA_ACCUMULATORS_64                                                           \
                 : "l"(a), "l"(b));                                                                      \
  }
FOLIO_WGMMA_FP8_SS(ScaleOut::kZero, "0")
FOLIO_WGMMA_FP8_SS(ScaleOut::kOne, "1")
#undef FOLIO_WGMMA_FP8_SS

#define FOLIO_WGMMA_FP8_RS(scale_out, adds, count, columns, i0, i1, i2, i3, i4)                                 \
  template <>                                                                                                   \
  __device__ __forceinline__ void wgmma_fp8_rs<scale_out, count>(float(&d)[count], const uint32_t(&a)[4],       \
                                                                 uint64_t b) {                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " adds ", 0; wgmma.mma_async.sync.aligned.m64n" columns         \
                 "k32.f32.e4m3.e4m3 {" FOLIO_WGMMA_REGISTERS_##count "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4 \
                                                                     ", p, 1, "                                 \
                                                                     "1;}"                                      \
                 : FOLIO_WGMMA_ACCUMULATORS_##count                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                         \
  }
FOLIO_WGMMA_FP8_RS(ScaleOut::kZero, "0", 32, "64", "%32", "%33", "%34", "%35", "%36")
FOLIO_WGMMA_FP8_RS(ScaleOut::kOne, "1", 32, "64", "%32", "%33", "%34", "%35", "%36")
FOLIO_WGMMA_FP8_RS(ScaleOut::kZero, "0", 64, "128", "%64", "%65", "%66", "%67", "%68")
FOLIO_WGMMA_FP8_RS(ScaleOut::kOne, "1", 64, "128", "%64", "%65", "%66", "%67", "%68")
#undef FOLIO_WGMMA_FP8_RS

#undef FOLIO_WGMMA_ACCUMULATORS_128
#undef FOLIO_WGMMA_REGISTERS_128
#undef FOLIO_WGMMA_ACCUMULATORS_48
#undef FOLIO_WGMMA_REGISTERS_48
#undef FOLIO_WGMMA_ACCUMULATORS_64
#undef FOLIO_WGMMA_REGISTERS_64
#undef FOLIO_WGMMA_ACCUMULATORS_32
#undef FOLIO_WGMMA_ACCUMULATORS_8
#undef FOLIO_WGMMA_REGISTERS_8
#undef FOLIO_WGMMA_REGISTERS_32

}  // namespace folio::inline v0::ptx
