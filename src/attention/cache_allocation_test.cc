#include <gtest/gtest.h>

#include "attention/cache_test_util.hpp"
#include "core/allocation_test_util.hpp"

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
    const int64_t allocations = folio::testing::num_allocations();
    write_kv_cache(context, args);
    EXPECT_EQ(folio::testing::num_allocations(), allocations);
    EXPECT_NE(pool.memory, before);
  }
}

}  // namespace
}  // namespace folio::inline v0::attention
