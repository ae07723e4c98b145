#include "attention/device_test_util.hpp"

#include <cstdlib>
#include <string_view>

#include "core/allocation_test_util.hpp"

namespace folio::testing {
namespace {

/// Ahead of other static objects: what these allocate may be for kernels to read.
struct HookedMemory {
  HookedMemory() { memory_hook = {device_memory, free_device_memory}; }
};
[[gnu::init_priority(101)]] HookedMemory hooked_memory;

}  // namespace

bool on_gpu() {
  static const bool on_gpu = [] {
    const char* const device = std::getenv("FOLIO_TEST_DEVICE");
    return device != nullptr && std::string_view(device) == "cuda";
  }();
  return on_gpu;
}

Context device_context(int32_t num_threads) {
  if (on_gpu()) return Context::cuda(0);
  return Context::cpu({.executor = {}, .num_threads = num_threads, .force_kernel = {}});
}

}  // namespace folio::testing
