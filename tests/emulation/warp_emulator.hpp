#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <device_launch_parameters.h>
#include <driver_types.h>
#include <vector_types.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

// Inlining by force is for GPUs: here it took nine tenths of the compiler's time, and gained nothing.
#undef __forceinline__
#define __forceinline__ inline

/// Threads of a GPU's CTA as fibers of one CPU thread, so that a kernel's device code, compiled for the host,
/// runs where there is no GPU: slow, deterministic, and with copies that arrive late. What PTX does that CUDA's own
/// functions do not is in ptx/ beside this, under the names of src/ptx.
namespace folio::emulation {

/// Of the running fiber. Device code's own threadIdx, blockIdx, blockDim and gridDim, which CUDA's headers declare,
/// have the running fiber's values too: for a fiber they never change.
uint3 thread_index();
/// Lets the other fibers run.
void yield();

/// Runs body() once for each of `threads` threads of each of `blocks` blocks, block by block, each with `shared_bytes`
/// of shared memory that holds anything. `seed` decides when asynchronous copies arrive. One grid runs at a time.
void run_grid(const dim3& blocks, int32_t threads, size_t shared_bytes, uint64_t seed,
              const std::function<void()>& body);
inline void run_grid(int32_t blocks, int32_t threads, size_t shared_bytes, uint64_t seed,
                     const std::function<void()>& body) {
  run_grid(dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, seed, body);
}

/// The block's shared memory, from a multiple of 1024 on. Addresses of src/ptx are offsets from it.
unsigned char* shared_memory();
inline uint32_t shared_offset(const void* data) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(data) - shared_memory());
}

/// Every lane of `mask` that has not returned hands in 32 bytes, and gets everyone's: [32][8]. Valid until the lane's
/// next call.
const uint32_t (*exchange(const uint32_t (&mine)[8], uint32_t mask = 0xffffffffu))[8];
/// Every thread of the block, or `threads` of them at barrier `id`, meet.
void named_barrier_sync(int32_t id, int32_t threads);
/// Returns whether `mine` is true in any of them.
bool named_barrier_any(int32_t id, int32_t threads, bool mine);
/// The same without waiting for the others.
void named_barrier_arrive(int32_t id, int32_t threads);
/// All threads of the block that have not returned meet. Returns how many gave true.
int32_t meet_all(bool mine = false);

void mbarrier_init(uint32_t barrier, uint32_t arrivals);
void mbarrier_arrive(uint32_t barrier, uint32_t count);
void expect(uint32_t barrier, uint32_t bytes);
bool mbarrier_test_wait(uint32_t barrier, uint32_t parity);

/// Asynchronous copies of the running thread: at once or later, but before those that cp_async_mbarrier_arrive counts.
void copy_later(void* to, const void* from, int32_t bytes, int32_t zeros);
void cp_async_mbarrier_arrive(uint32_t barrier);
void finish_copies();
/// Groups of cp.async, and waiting for all but the last `pending`.
void commit_copies();
void finish_groups(int32_t pending);

/// A tensor map as encode_map leaves it in a CUtensorMap.
struct TensorMap {
  unsigned char* data;
  uint64_t dims[5];
  uint64_t strides[5];  ///< bytes
  uint32_t box[5];
  uint16_t bytes;         ///< of an element
  uint16_t side_by_side;  ///< 64 or 128 bytes, within which pieces of 16 are exchanged
};
CUresult encode_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* dims,
                    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                    CUtensorMapFloatOOBfill fill);
/// A read of 16 bytes by the running thread. Until complete_reads, what follows it may overtake it: copy_box refuses to
/// write there.
void note_read(uint32_t shared);
/// The running thread's reads are complete: a fence, an arrival, a barrier, or the use of what was read.
void complete_reads();
void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, const int32_t (&at)[5]);
void store_box(const CUtensorMap* map, uint32_t shared, const int32_t (&at)[5]);

template <typename T>
T shuffle(T value, int32_t source, uint32_t mask = 0xffffffffu) {
  static_assert(sizeof(T) <= 32);
  uint32_t mine[8] = {};
  std::memcpy(mine, &value, sizeof(T));
  T result;
  std::memcpy(&result, exchange(mine, mask)[source], sizeof(T));
  return result;
}
/// Combines the values of the lanes of `mask`.
template <typename T, typename Combine>
T reduce(T value, Combine combine, uint32_t mask = 0xffffffffu) {
  uint32_t mine[8] = {};
  std::memcpy(mine, &value, sizeof(T));
  const auto* all = exchange(mine, mask);
  T result = value;
  for (uint32_t i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0 || i == thread_index().x % 32) continue;
    T other;
    std::memcpy(&other, all[i], sizeof(T));
    result = combine(result, other);
  }
  return result;
}

inline int32_t lane() {
  return static_cast<int32_t>(thread_index().x % 32);
}
}  // namespace folio::emulation

// What device code finds without an include.
template <typename T>
T __shfl_sync(uint32_t mask, T value, int32_t source, int32_t width = 32) {
  const int32_t first = folio::emulation::lane() & ~(width - 1);
  return folio::emulation::shuffle(value, first + (source & (width - 1)), mask);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int32_t lanes) {
  return folio::emulation::shuffle(value, folio::emulation::lane() ^ lanes, mask);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, uint32_t lanes) {
  const int32_t source = folio::emulation::lane() - static_cast<int32_t>(lanes);
  return folio::emulation::shuffle(value, source < 0 ? folio::emulation::lane() : source, mask);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, uint32_t lanes) {
  const int32_t source = folio::emulation::lane() + static_cast<int32_t>(lanes);
  return folio::emulation::shuffle(value, source > 31 ? folio::emulation::lane() : source, mask);
}
inline bool __any_sync(uint32_t mask, bool value) {
  return folio::emulation::reduce(
             value ? 1 : 0, [](int a, int b) { return a | b; }, mask) != 0;
}
inline uint32_t __ballot_sync(uint32_t mask, bool value) {
  const uint32_t mine = value ? 1u << folio::emulation::lane() : 0;
  return folio::emulation::reduce(
      mine, [](uint32_t a, uint32_t b) { return a | b; }, mask);
}
inline bool __all_sync(uint32_t mask, bool value) {
  return folio::emulation::reduce(
             value ? 1 : 0, [](int a, int b) { return a & b; }, mask) != 0;
}
inline int32_t __popc(uint32_t value) {
  return __builtin_popcount(value);
}
inline int32_t __clz(int32_t value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(value));
}
inline int32_t __ffs(int32_t value) {
  return __builtin_ffs(value);
}
template <typename T>
T __reduce_min_sync(uint32_t mask, T value) {
  return folio::emulation::reduce(
      value, [](T a, T b) { return a < b ? a : b; }, mask);
}
template <typename T>
T __reduce_max_sync(uint32_t mask, T value) {
  return folio::emulation::reduce(
      value, [](T a, T b) { return a < b ? b : a; }, mask);
}
template <typename T>
T __reduce_add_sync(uint32_t mask, T value) {
  return folio::emulation::reduce(
      value, [](T a, T b) { return static_cast<T>(a + b); }, mask);
}
inline void __syncwarp(uint32_t mask = 0xffffffffu) {
  static_cast<void>(folio::emulation::exchange({}, mask));
}
inline void __syncthreads() {
  static_cast<void>(folio::emulation::meet_all());
}
inline int32_t __syncthreads_or(int32_t mine) {
  return folio::emulation::meet_all(mine != 0) > 0 ? 1 : 0;
}
inline int32_t __syncthreads_and(int32_t mine) {
  return folio::emulation::meet_all(mine == 0) > 0 ? 0 : 1;
}
inline void __threadfence() {}
inline void __threadfence_system() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
template <typename T>
void __stcs(T* at, T value) {
  *at = value;
}
// The host reads and clears what the device reports through mapped memory: atomics are those of the processor.
template <typename T>
T atomicAdd(T* at, T value) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicMax(T* at, T value) {
  T before = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  while (before < value &&
         !__atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return before;
}
template <typename T>
T atomicCAS(T* at, T expected, T value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t bytes = a | uint64_t{b} << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = select >> 4 * i & 15;
    auto byte = static_cast<uint32_t>(bytes >> 8 * (code & 7) & 0xff);
    if ((code & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;  // its sign
    result |= byte << 8 * i;
  }
  return result;
}
inline uint32_t __float_as_uint(float value) {
  return __builtin_bit_cast(uint32_t, value);
}
inline float __uint_as_float(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
inline float __int_as_float(int32_t bits) {
  return __builtin_bit_cast(float, bits);
}
inline double __longlong_as_double(long long bits) {
  return __builtin_bit_cast(double, bits);
}
using std::isfinite;
using std::isinf;
using std::isnan;
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = static_cast<float>(std::sin(M_PI * x));
  *cosine = static_cast<float>(std::cos(M_PI * x));
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fmaf(a, b, c);
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xffffu) < (b & 0xffffu) ? b & 0xffffu : a & 0xffffu;
  const uint32_t high = (a >> 16) < (b >> 16) ? b >> 16 : a >> 16;
  return low | high << 16;
}
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
