#include "core/allocation_test_util.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <new>

// A file of its own: where gcc inlines only one of a pair of replaced operators, it warns that they do not match.
namespace {
std::atomic<int64_t> allocations{0};

void release(void* memory) noexcept {
  const auto hook = folio::testing::memory_hook.release;
  if (hook == nullptr || !hook(memory)) std::free(memory);
}

void* counted(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  const auto hook = folio::testing::memory_hook.allocate;
  if (void* const hooked = hook != nullptr ? hook(bytes, alignment) : nullptr) return hooked;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes == 0 ? 1 : bytes) != 0) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t bytes) {
  return counted(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
// The sanitizers' own nothrow form would not call the one above, but its memory would come to the delete below.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return counted(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept {
  release(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  release(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  release(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  release(memory);
}

namespace folio::testing {

int64_t num_allocations() {
  return allocations;
}

bool counts_shared_libraries() {
  void* (*const own)(std::size_t) = &operator new;
  return dlsym(RTLD_DEFAULT, "_Znwm") == reinterpret_cast<void*>(own);
}

}  // namespace folio::testing
