#pragma once

#include <cstdint>

/// Reads of global memory that C++ does not express.
namespace folio::inline v0::ptx {

/// 16 bytes past the L1 where `wanted`; else `to` stays what it is. Written out, as many of them are to
/// be under way at once: the compiler reads to other registers and waits to move what has come.
__device__ __forceinline__ void ld_global_16_if(float4& to, const void* from, bool wanted) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];}"
               : "+f"(to.x), "+f"(to.y), "+f"(to.z), "+f"(to.w)
               : "l"(from), "r"(static_cast<int>(wanted))
               : "memory");
}

/// A word where `wanted`, else `to` stays what it is: without a branch, so that others are asked for meanwhile.
__device__ __forceinline__ void ld_global_4_if(int32_t& to, const int32_t* from, bool wanted) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.b32 %0, [%1];}"
               : "+r"(to)
               : "l"(from), "r"(static_cast<int>(wanted))
               : "memory");
}

/// Reads a word of the kernel's parameters for nothing but its line.
__device__ __forceinline__ void read_constant(const uint32_t* word) {
  asm volatile("" ::"r"(*word));
}

/// Brings the line of an address to the L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

}  // namespace folio::inline v0::ptx
