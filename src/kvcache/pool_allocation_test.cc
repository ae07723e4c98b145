#include <gtest/gtest.h>

#include <vector>

#include "core/allocation_test_util.hpp"
#include "folio/kvcache/kv_pool.hpp"
#include "folio/kvcache/req_to_token_pool.hpp"
#include "folio/kvcache/window_token_allocator.hpp"

namespace folio {
namespace {

/// Pools and allocators allocate nothing once they are there.
TEST(PoolAllocation, StepsAllocateNothing) {
  WindowTokenAllocator allocator(4096, 2048, 4);
  TokenAllocator plain(4096, 4);
  ReqToTokenPool rows(8, 512);
  KvPoolConfig config;
  config.num_slots = 64;
  config.num_layers = 1;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = 8;
  const KvPool pool(config);
  const std::vector<int32_t> prefix{0, 0}, grown{6, 3}, longer{7, 4}, none{-1, -1};
  std::vector<int32_t> slots(9), last(2), next(2), many(1000), window(1000);
  const std::vector<int64_t> locations(3);
  const std::vector<uint16_t> values(3 * 2 * 8);

  const int64_t before = folio::testing::num_allocations();
  for (int step = 0; step < 20; ++step) {
    EXPECT_TRUE(allocator.alloc_extend(prefix, grown, none, slots));
    last = {slots[5], slots[8]};
    EXPECT_TRUE(allocator.alloc_decode(longer, last, next));
    EXPECT_TRUE(allocator.alloc(many));
    allocator.to_window(many, window);
    allocator.free_window(many);
    allocator.free(many);
    allocator.free(slots);
    EXPECT_TRUE(plain.alloc(many));
    {
      const TokenAllocator::FreeGroup group = plain.free_group();
      plain.free(many);
    }
    const int32_t row = rows.alloc().value();
    rows.write(row, 0, slots);
    rows.free(row);
    const ConstTensorView k(values.data(), DType::kFloat16, {1, 3, 2, 8});
    EXPECT_EQ(pool.write_args(0, k, k, locations).num_slots, 3);
  }
  EXPECT_EQ(folio::testing::num_allocations(), before);
}

}  // namespace
}  // namespace folio
