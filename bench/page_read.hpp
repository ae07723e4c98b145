#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

/// What attention on a GPU is measured against: reading the same pages, and nothing else.
namespace folio_bench {

/// Enqueues a read of `page_bytes` (a multiple of 16) of two pools at each of `num_pages` page ids, in the list's
/// order. `sink` takes what keeps the reads from being left out.
void read_pages(const void* k, const void* v, size_t page_bytes, const int32_t* pages, int32_t num_pages, int32_t* sink,
                cudaStream_t stream);

/// The same by Hopper's TMA (compute capability 9.0), into shared memory: what a kernel that copies so cannot
/// be faster than. `page_bytes` divides 16 KiB or is a multiple of it. `counters`: two, zero, and left zero.
void bulk_read_pages(const void* k, const void* v, size_t page_bytes, size_t pool_bytes, const int32_t* pages,
                     int32_t num_pages, uint32_t* counters, cudaStream_t stream);

/// Keeps the stream busy for so many microseconds, in one thread: what is enqueued meanwhile begins without waiting for
/// the host.
void occupy(uint32_t microseconds, cudaStream_t stream);

/// Fills memory with bfloat16 values that are nearly normal: what a GPU does with zeros it does faster.
void fill_normal(void* data, size_t elements, uint32_t seed, cudaStream_t stream);

/// Fills memory (a multiple of 4 bytes) with random e4m3 values of magnitudes below 2.
void fill_fp8(void* data, size_t bytes, uint32_t seed, cudaStream_t stream);

}  // namespace folio_bench
