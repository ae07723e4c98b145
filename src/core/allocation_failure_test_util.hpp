#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <new>

#include "core/allocation_test_util.hpp"
#include "folio/types/error.hpp"

namespace folio::testing {

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

inline std::atomic<int64_t> allocations_left{kNever};  // until the one that fails
inline std::atomic<bool> all_after{false};             // the later ones fail too
inline std::atomic<int64_t> blocks{0};

/// Makes the n-th allocation from now on fail; counts the blocks that are not freed.
class FailingAllocation {
 public:
  FailingAllocation(int64_t n, bool later_too) {
    blocks = 0;
    all_after = later_too;
    allocations_left = n;
    memory_hook = {.allocate = allocate, .release = release};
  }
  ~FailingAllocation() { disarm(); }
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  static bool failed() { return allocations_left <= 0; }
  /// Memory can be had again; blocks are still counted.
  static void allow() {
    if (allocations_left > 0) allocations_left = kNever;
    all_after = false;
  }
  static void disarm() {
    memory_hook = {};
    allocations_left = kNever;
  }

 private:
  static void* allocate(size_t, size_t) {
    const int64_t left = --allocations_left;
    if (left == 0 || (left < 0 && all_after)) throw std::bad_alloc();
    ++blocks;
    return nullptr;  // from the heap
  }
  static bool release(void* memory) noexcept {
    if (memory != nullptr) --blocks;
    return false;
  }
};

/// How a call ended.
enum class End { kDone, kOutOfMemory, kOther };

template <typename Call>
End end_of(const Call& call) {
  try {
    call();
    return End::kDone;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kOutOfMemory ? End::kOutOfMemory : End::kOther;
  } catch (const std::bad_alloc&) {
    return End::kOutOfMemory;
  }
}

/// Calls `call` with the first, second, ... allocation failing, until there are no more; `after` with memory again.
template <typename Call, typename After>
void sweep_failing_allocations(const Call& call, const After& after) {
  call();  // makes what is made once in a process and kept: the list of kernels
  after();
  for (const bool later_too : {false, true}) {
    int64_t n = 1;
    int64_t refused = 0;
    for (;; ++n) {
      ASSERT_LT(n, 10000);
      End end = End::kDone;
      int64_t kept = 0;
      bool failed = false;
      {
        const FailingAllocation failing(n, later_too);
        end = end_of(call);
        failed = FailingAllocation::failed();
        FailingAllocation::allow();
        after();
        kept = blocks;
      }
      EXPECT_EQ(kept, 0) << "allocation " << n << ": blocks are not freed";
      if (!failed) {
        EXPECT_EQ(end, End::kDone);
        break;
      }
      // What an algorithm can do without, such as stable_sort's buffer, fails unseen.
      ASSERT_NE(end, End::kOther) << "allocation " << n << (later_too ? " and all later ones" : "");
      refused += end == End::kOutOfMemory ? 1 : 0;
    }
    EXPECT_GT(refused, n / 2) << "of " << n << " allocations";
  }
}

}  // namespace folio::testing
