#pragma once

#include <cstddef>
#include <cstdint>

namespace folio::testing {

/// How often any operator new has been called in this program, which links the counting ones of
/// core/allocation_test_util.cc.
int64_t num_allocations();

/// Whether shared libraries call these operators too: not those into which a compiler linked its standard library.
bool counts_shared_libraries();

/// Memory for operator new from elsewhere than the host's heap. Set before the program's static objects are made, since
/// these allocate too.
struct MemoryHook {
  void* (*allocate)(size_t bytes, size_t alignment) = nullptr;  ///< gives null where the heap's is to be taken
  bool (*release)(void* memory) noexcept = nullptr;             ///< false for memory that is not from `allocate`
};
inline constinit MemoryHook memory_hook;

}  // namespace folio::testing
