#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "attention/cache_test_util.hpp"

namespace {

std::atomic<bool> counting = false;
std::atomic<int64_t> allocations = 0;

}  // namespace

// noinline: otherwise gcc sees malloc and operator delete as a mismatched pair.
__attribute__((noinline)) void* operator new(size_t bytes) {
  if (counting) ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace folio::inline v0::attention {
namespace {

/// Once a layer and step: nothing may be allocated, also where slots repeat and token pairs are split.
TEST(WriteKvCache, AllocatesNothing) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
  for (Layout layout : {Layout::kNhd, Layout::kPacked}) {
    Pool pool(layout, {32, 16, 2, 64, 64, DType::kFloat8E4M3}, 1);
    Rows k(DType::kBFloat16, 400, 2, 64, 0, 2), v(DType::kBFloat16, 400, 2, 64, 0, 3);
    std::vector<int64_t> slots(400);
    for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int64_t>(i * 7 % 300);
    CacheWriteArgs args;
    args.k = k.view();
    args.v = v.view();
    args.slot_mapping = slots.data();
    args.num_slots = 400;
    args.cache = pool.view();
    const auto before = pool.memory;
    allocations = 0;
    counting = true;
    write_kv_cache(context, args);
    counting = false;
    EXPECT_EQ(allocations, 0);
    EXPECT_NE(pool.memory, before);
  }
}

}  // namespace
}  // namespace folio::inline v0::attention
