#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <driver_types.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

/// Threads of a GPU's CTA as fibers of one CPU thread, so that a kernel's device code, compiled for the host,
/// runs where there is no GPU: slow, deterministic, and with copies that arrive late. What PTX does that CUDA's own
/// functions do not is in ptx/ beside this, under the names of src/ptx.
namespace folio::emulation {

struct Index {
  int32_t x;
};
/// Of the running fiber.
Index thread_index();
Index block_index();
struct Count {
  uint32_t x;
};
Count grid_size();
/// Lets the other fibers run.
void yield();

/// Runs body() once for each of `threads` threads of each of `blocks` blocks, block by block, each with `shared_bytes`
/// of shared memory that holds anything. `seed` decides when asynchronous copies arrive.
void run_grid(int32_t blocks, int32_t threads, size_t shared_bytes, uint64_t seed, const std::function<void()>& body);

/// The block's shared memory, from a multiple of 1024 on. Addresses of src/ptx are offsets from it.
unsigned char* shared_memory();
inline uint32_t shared_offset(const void* data) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(data) - shared_memory());
}

/// Every lane of a warp hands in 32 bytes, and gets everyone's: [32][8]. Valid until the lane's next call.
const uint32_t (*exchange(const uint32_t (&mine)[8]))[8];
/// Every thread of the block, or `threads` of them at barrier `id`, meet.
void named_barrier_sync(int32_t id, int32_t threads);
/// The same without waiting for the others.
void named_barrier_arrive(int32_t id, int32_t threads);
void meet_all();

void mbarrier_init(uint32_t barrier, uint32_t arrivals);
void mbarrier_arrive(uint32_t barrier, uint32_t count);
void expect(uint32_t barrier, uint32_t bytes);
bool mbarrier_test_wait(uint32_t barrier, uint32_t parity);

/// Asynchronous copies of the running thread: at once or later, but before those that cp_async_mbarrier_arrive counts.
void copy_later(void* to, const void* from, int32_t bytes, int32_t zeros);
void cp_async_mbarrier_arrive(uint32_t barrier);
void finish_copies();

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
void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, const int32_t (&at)[5]);
void store_box(const CUtensorMap* map, uint32_t shared, const int32_t (&at)[5]);

template <typename T>
T shuffle(T value, int32_t source) {
  uint32_t mine[8] = {};
  std::memcpy(mine, &value, sizeof(T));
  T result;
  std::memcpy(&result, exchange(mine)[source], sizeof(T));
  return result;
}
template <typename T, typename Combine>
T reduce(T value, Combine combine) {
  uint32_t mine[8] = {};
  std::memcpy(mine, &value, sizeof(T));
  const auto* all = exchange(mine);
  T result;
  std::memcpy(&result, all[0], sizeof(T));
  for (int32_t i = 1; i < 32; ++i) {
    T other;
    std::memcpy(&other, all[i], sizeof(T));
    result = combine(result, other);
  }
  return result;
}

}  // namespace folio::emulation

// What device code finds without an include.
#define threadIdx (::folio::emulation::thread_index())
#define blockIdx (::folio::emulation::block_index())
#define gridDim (::folio::emulation::grid_size())

template <typename T>
T __shfl_sync(uint32_t, T value, int32_t source) {
  return folio::emulation::shuffle(value, source & 31);
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int32_t lanes) {
  return folio::emulation::shuffle(value, (folio::emulation::thread_index().x & 31) ^ lanes);
}
inline bool __any_sync(uint32_t, bool value) {
  return folio::emulation::reduce(value ? 1 : 0, [](int a, int b) { return a | b; }) != 0;
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  const uint32_t mine = value ? 1u << (folio::emulation::thread_index().x & 31) : 0;
  return folio::emulation::reduce(mine, [](uint32_t a, uint32_t b) { return a | b; });
}
inline bool __all_sync(uint32_t, bool value) {
  return folio::emulation::reduce(value ? 1 : 0, [](int a, int b) { return a & b; }) != 0;
}
inline int32_t __popc(uint32_t value) {
  return __builtin_popcount(value);
}
inline int32_t __reduce_min_sync(uint32_t, int32_t value) {
  return folio::emulation::reduce(value, [](int32_t a, int32_t b) { return a < b ? a : b; });
}
inline int32_t __reduce_max_sync(uint32_t, int32_t value) {
  return folio::emulation::reduce(value, [](int32_t a, int32_t b) { return a < b ? b : a; });
}
inline void __syncwarp() {
  static_cast<void>(__any_sync(0, false));
}
inline void __syncthreads() {
  folio::emulation::meet_all();
}
inline void __threadfence() {}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t bytes = a | uint64_t{b} << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> 8 * (select >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  return folio::emulation::reduce(value, [](uint32_t a, uint32_t b) { return a < b ? b : a; });
}
inline uint32_t atomicAdd(uint32_t* counter, uint32_t value) {
  const uint32_t before = *counter;
  *counter += value;
  return before;
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
inline int32_t __ffs(int32_t value) {
  return __builtin_ffs(value);
}
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
