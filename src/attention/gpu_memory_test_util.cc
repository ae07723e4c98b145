// Pinned memory behind operator new: a heap of blocks whose sizes are powers of two, in chunks that are never given
// back.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>

#include "attention/device_test_util.hpp"

namespace folio::testing {
namespace {

constexpr int kSmallest = 6;  ///< blocks of 2^6 bytes: what kernels may want of an address is that, or asked for
constexpr int kSlab = 16;     ///< smaller blocks share a slab of 2^16 bytes
constexpr int kChunk = 28;    ///< chunks are of 2^28 bytes at least
constexpr size_t kMaxChunks = 64;

struct Block {
  Block* next;
};

struct Chunk {
  std::byte* begin = nullptr;
  size_t slabs = 0;
  size_t used = 0;                  ///< slabs
  uint8_t* size_of_slab = nullptr;  ///< of each, the logarithm of its blocks' size
};

/// Everything is constant-initialised and trivially destroyed: operator new is called before and after main.
struct Heap {
  std::mutex mutex;
  std::array<Chunk, kMaxChunks> chunks;
  size_t num_chunks = 0;
  std::array<Block*, 64> free{};
  bool started = false;
};
constinit Heap heap;
/// Set while the runtime is asked for memory, which may ask for some itself.
thread_local bool in_runtime = false;

std::byte* take_slabs(size_t count, int size) {
  Chunk* chunk = heap.num_chunks == 0 ? nullptr : &heap.chunks[heap.num_chunks - 1];
  if (chunk == nullptr || chunk->slabs - chunk->used < count) {
    if (heap.num_chunks == kMaxChunks) return nullptr;
    Chunk made;
    made.slabs = std::max(count, size_t{1} << (kChunk - kSlab));
    in_runtime = true;
    void* memory = nullptr;
    const cudaError_t status = cudaHostAlloc(&memory, made.slabs << kSlab, cudaHostAllocPortable | cudaHostAllocMapped);
    in_runtime = false;
    made.size_of_slab = static_cast<uint8_t*>(std::calloc(made.slabs, 1));
    if (status != cudaSuccess || made.size_of_slab == nullptr) return nullptr;
    made.begin = static_cast<std::byte*>(memory);
    chunk = &heap.chunks[heap.num_chunks++];
    *chunk = made;
  }
  std::byte* const slabs = chunk->begin + (chunk->used << kSlab);
  std::fill_n(chunk->size_of_slab + chunk->used, count, static_cast<uint8_t>(size));
  chunk->used += count;
  return slabs;
}

Block* take(int size) {
  Block*& free = heap.free[static_cast<size_t>(size)];
  if (free == nullptr && size < kSlab) {
    std::byte* const slab = take_slabs(1, size);
    if (slab == nullptr) return nullptr;
    for (size_t at = size_t{1} << kSlab; at > 0; at -= size_t{1} << size) {
      free = new (slab + at - (size_t{1} << size)) Block{free};
    }
  }
  if (free == nullptr) return reinterpret_cast<Block*>(take_slabs(size_t{1} << (size - kSlab), size));
  Block* const block = free;
  free = block->next;
  return block;
}

class GpuEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    if (!on_gpu()) return;
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "FOLIO_TEST_DEVICE: no GPU";
    heap.started = true;
  }
};
[[maybe_unused]] const auto* const environment = ::testing::AddGlobalTestEnvironment(new GpuEnvironment);

}  // namespace

void wait_for_device() {
  if (on_gpu() && cudaDeviceSynchronize() != cudaSuccess) throw std::runtime_error("the GPU has failed");
}

std::vector<int32_t> on_host(std::span<const int32_t> values) {
  wait_for_device();
  std::vector<int32_t> copy(values.size());
  if (!on_gpu()) {
    std::ranges::copy(values, copy.begin());
  } else if (cudaMemcpy(copy.data(), values.data(), values.size_bytes(), cudaMemcpyDefault) != cudaSuccess) {
    throw std::runtime_error("the GPU has failed");
  }
  return copy;
}

void* device_memory(size_t bytes, size_t alignment) {
  if (!heap.started || in_runtime) return nullptr;
  const int size = std::max(kSmallest, static_cast<int>(std::bit_width(std::max({bytes, alignment, size_t{1}}) - 1)));
  const std::lock_guard lock(heap.mutex);
  void* const memory = take(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

bool free_device_memory(void* memory) noexcept {
  if (!heap.started || memory == nullptr) return false;
  const std::lock_guard lock(heap.mutex);
  auto* const at = static_cast<std::byte*>(memory);
  for (size_t i = 0; i < heap.num_chunks; ++i) {
    const Chunk& chunk = heap.chunks[i];
    if (at < chunk.begin || at >= chunk.begin + (chunk.slabs << kSlab)) continue;
    const size_t size = chunk.size_of_slab[static_cast<size_t>(at - chunk.begin) >> kSlab];
    heap.free[size] = new (memory) Block{heap.free[size]};
    return true;
  }
  return false;
}

}  // namespace folio::testing
