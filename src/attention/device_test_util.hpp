#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "folio/context.hpp"

/// Suites that run on either device: on the CPU, and with the environment's FOLIO_TEST_DEVICE=cuda on the first GPU.
/// There all memory of operator new is pinned memory of the host's, which kernels reach under the same addresses
/// (programs that link core/allocation_test_util.cc), and every launch waits for its end: what a fixture
/// has made is an array in device memory to the library, and what kernels have written is there when a call has
/// returned.
namespace folio::testing {

/// Whether this run's contexts are a GPU's.
bool on_gpu();

/// The context of this run's device; of a CPU with so many threads.
Context device_context(int32_t num_threads = 2);

/// Waits for what is enqueued besides launches: clears and copies.
void wait_for_device();

/// Values that the library keeps in memory of its own, wherever that is. Waits for the device.
std::vector<int32_t> on_host(std::span<const int32_t> values);

/// Memory for operator new: null where the host's own is to be taken. `alignment`: a power of two.
void* device_memory(size_t bytes, size_t alignment);
/// False for memory that is not from device_memory.
bool free_device_memory(void* memory) noexcept;

}  // namespace folio::testing

/// For tests of what only a CPU has: skips on a GPU and says why.
#define FOLIO_CPU_ONLY(reason)                                    \
  do {                                                            \
    if (folio::testing::on_gpu()) GTEST_SKIP() << "" << (reason); \
  } while (false)
